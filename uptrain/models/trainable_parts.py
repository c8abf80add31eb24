"""Name the parameters of the parts of a model that `--trainable` chooses. Needs no torch."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from model.checkpoint import TensorInfo
from model.checkpoint.latent_norm import KV_A, KV_B, read_latent_norm
from model.checkpoint.tensor import is_buffer
from model.common.errors import InputError
from model.families import FAMILIES
from model.families.family import Family
from model.language_model import wrapper_of
from uptrain.models.trainable_choices import TRAINABLE

_LATENT = {"attention": ("self_attn", "input_layernorm"), "kv": (f"self_attn.{KV_A}", f"self_attn.{KV_B}")}
"""The modules of each part in a layer of latent attention."""


def part_pattern(trainable: str, config: Mapping[str, Any]) -> re.Pattern[str]:
    """Return a pattern of the names of a part's parameters, in memory and in files.

    Raises InputError if the family has no such part, or is not known.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if trainable in ("all", "lora") and isinstance(family, Family) and family.joins_experts:
        raise InputError(
            f"--trainable {trainable}: transformers holds the experts of model_type {model_type!r} under other names "
            "than the files do, so other programs could not open the result; use --trainable attention."
        )
    if trainable == "all" and (wrapper := wrapper_of(config)) is not None:
        raise InputError(
            f"--trainable all: of model_type {wrapper!r}, only the language model inside is trained, on text; use "
            "--trainable attention."
        )
    if trainable == "all":
        return re.compile("")
    if trainable == "lora":
        return re.compile(r"\.lora_[AB]\.")
    if read_latent_norm(config) is not None:
        return _of_layers("layers", _LATENT[trainable])
    if not isinstance(family, Family):
        raise InputError(
            f"--trainable {trainable}: how model_type {model_type!r} names attention is not known; use --trainable all."
        )
    names = family.names
    if trainable == "attention":
        modules = [*names.attention, *filter(None, [names.attention_norm])]
    elif names.fused is None:
        modules = [f"{module}.{name}" for module in names.attention for name in (names.key, names.value)]
    else:
        raise InputError(
            f"--trainable kv: model_type {model_type!r} holds queries, keys and values in one tensor "
            f"({names.fused}); use --trainable attention."
        )
    return _of_layers(names.layers, modules)


def _of_layers(layers: str, modules: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(^|\.){re.escape(layers)}\.\d+\.({'|'.join(map(re.escape, modules))})\.")


def text_only_warning(config: Mapping[str, Any], trained: bool = True) -> str | None:
    """Return a warning if a config is of the language model inside a wrapper: it is trained, or measured, alone."""
    wrapper = wrapper_of(config)
    if wrapper is None:
        return None
    if not trained:
        return f"of model_type {wrapper!r}, only the language model inside is measured, on text alone."
    return (
        f"of model_type {wrapper!r}, only the language model inside is trained, on text alone; what it answers to "
        "images or sound changes too, and is not measured."
    )


def knows_attention(config: Mapping[str, Any]) -> bool:
    """Return whether the names of a model's attention are known, so that attention can be trained alone."""
    return isinstance(FAMILIES.get(str(config.get("model_type"))), Family) or read_latent_norm(config) is not None


def common_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Return the dtype of a model's frozen parameters: the half precision that all tensors have, else float32."""
    dtypes = {tensor.dtype for tensor in tensors if not is_buffer(tensor)}
    return dtypes.pop() if dtypes in ({"BF16"}, {"F16"}) else "F32"


def parts_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the choices of `--trainable` that a model has."""
    return tuple(trainable for trainable in TRAINABLE if _has_part(trainable, config))


def _has_part(trainable: str, config: Mapping[str, Any]) -> bool:
    try:
        part_pattern(trainable, config)
    except InputError:
        return False
    return True
