"""Check that no tensor besides attention's is missing. transformers would initialise a missing one at random."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from model.attention_layout import ModelLayout, make_layer_layout
from model.checkpoint import Checkpoint
from model.checkpoint.tied import LM_HEAD, NEOX_LM_HEAD
from model.common import checks
from model.common.errors import CheckpointError
from model.decoder.config import is_native, read_llama_config
from model.families.family import HeadNorms, get_key

LM_HEADS = (LM_HEAD, NEOX_LM_HEAD)
"""Ends of the names of an LM head's tensor."""


BESIDE_ATTENTION = (
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight",
    "post_attention_layernorm.weight",
)  # fmt: skip
"""A layer's tensors besides attention's and biases, in the families of `is_native`."""
_BIASES = {
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"),
}
"""The biases that a setting of `LlamaConfig` turns on."""


_CLASSES_WITH_LM_HEAD = ("CausalLM", "LMHead", "ConditionalGeneration")
"""Parts of the names of classes with an LM head."""


def has_lm_head(checkpoint: Checkpoint) -> bool:
    """Return whether a model has a language-model head, of its own or tied to the embedding.

    Reward models (`LlamaForSequenceClassification`) and base models (`LlamaModel`) have none.
    """
    config = checkpoint.config
    if any(name.endswith(LM_HEADS) for name in checkpoint.tensors):
        return True
    if is_native(config) and config.get("tie_word_embeddings") is not True:
        return False
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return True
    return any(part in str(name) for name in classes for part in _CLASSES_WITH_LM_HEAD)


def check_lm_head(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a model has no language-model head, without which it predicts no tokens."""
    if not has_lm_head(checkpoint):
        classes = checkpoint.config.get("architectures")
        named = f" (architectures: {checks.short_repr(classes)})" if classes else ""
        raise CheckpointError(
            f"{checkpoint.config_folder} has no language-model head: it lacks the tensor {LM_HEADS[0]}{named}. "
            "uptrain measures and trains causal language models only."
        )


def check_complete(attention: ModelLayout, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a layer, or what comes before and after the layers, lacks a tensor.

    `config`: that of the language model inside a wrapper, otherwise the checkpoint's.
    """
    family, tensors = attention.family, checkpoint.tensors
    prefixes = attention.layer_prefixes
    layers = _parts(attention, checkpoint)
    _check_layers(layers, checkpoint)
    if is_native(config):
        _check_native_layers(layers, checkpoint, config)
    _check_norms(attention, layers, checkpoint, config)
    stack = re.sub(r"[^.]+\.\d+\.$", "", prefixes[0])
    holds_lm_head = any(name.endswith(LM_HEADS) for name in tensors)
    names = family.names
    embedding, final_norm = f"{stack}{names.embedding}.weight", f"{stack}{names.final_norm}.weight"
    is_tied = any(each.get("tie_word_embeddings") is True for each in (config, checkpoint.config))
    lm_head_replaces_embedding = holds_lm_head and is_tied
    if names.embedding and embedding not in tensors and not lm_head_replaces_embedding:
        raise _lacks(checkpoint, embedding)
    has_norms = any("norm" in part or "ln_" in part for part in layers[prefixes[0]])
    if names.final_norm and has_norms and final_norm not in tensors:
        raise _lacks(checkpoint, final_norm)
    for alternatives in names.elsewhere:
        if not any(name in tensors for name in alternatives):
            raise _lacks(checkpoint, alternatives[0])
    if not holds_lm_head and stack and _needs_lm_head(checkpoint.config, config):
        raise CheckpointError(
            f"{_lacks(checkpoint, f'{names.lm_head}.weight')} If its head is the embedding, set "
            "tie_word_embeddings to true in config.json."
        )


def _check_native_layers(layers: Mapping[str, set[str]], checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    needed = [*BESIDE_ATTENTION]
    with suppress(CheckpointError):  # of a bad value, which is reported where the model is built
        settings = read_llama_config(config)
        needed += [name for setting, names in _BIASES.items() if getattr(settings, setting) for name in names]
    for prefix, names in layers.items():
        for name in needed:
            if name not in names:
                raise _lacks(checkpoint, prefix + name)


def _check_norms(
    attention: ModelLayout, layers: Mapping[str, set[str]], checkpoint: Checkpoint, config: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if a layer lacks a norm of its queries or its keys."""
    norms = attention.family.head_norms
    if norms is None or (norms.switch is not None and get_key(config, norms.switch) is not True):
        return
    parts = [part for part in make_layer_layout(attention.family, attention.sizes).shapes if _is_of_norm(part, norms)]
    for prefix, names in layers.items():
        for part in parts:
            if part not in names:
                raise _lacks(checkpoint, prefix + part)


def _is_of_norm(part: str, norms: HeadNorms) -> bool:
    is_norm = any(f".{norm}." in part for norm in (norms.query, norms.key))
    return is_norm and (norms.kind == "layer" or not part.endswith(".bias"))  # RMSNorm has no bias


def _needs_lm_head(config: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    """Return whether the class has an LM head with a tensor of its own. `inner`: as in `check_complete`."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1:
        return False
    tied = config.get("tie_word_embeddings")
    if config.get("model_type") != inner.get("model_type"):  # a wrapper: see `language_model.ties_lm_head`
        own = inner.get("tie_word_embeddings")
        is_untied = tied is False and (own is False or (own is None and is_native(inner)))
        return is_untied and str(classes[0]).endswith("ForConditionalGeneration")
    if not str(classes[0]).endswith("ForCausalLM"):
        return False
    return tied is False or (tied is None and is_native(config))  # untied is the default of the native classes


def _parts(attention: ModelLayout, checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Return the names of each layer's tensors, without the layer's prefix. Buffers and the like are left out."""
    family = attention.family
    ignored = tuple(f"{module}.{part}" for module in family.names.attention for part in family.names.headless_parts)
    parts: dict[str, set[str]] = {prefix: set() for prefix in attention.layer_prefixes}
    for name in checkpoint.tensors:
        ends = (match.end() for match in re.finditer(r"(?:^|\.)\d+\.", name))
        end = next((end for end in ends if name[:end] in parts), None)
        if end is not None and not name.endswith(ignored):
            parts[name[:end]].add(name[end:])
    return parts


def _check_layers(layers: Mapping[str, set[str]], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a layer lacks a tensor that others have, and has none in its place.

    Layers may differ: one with experts has no dense MLP. Then each has tensors that the other does not have.
    """
    kinds = {frozenset(names): prefix for prefix, names in layers.items()}
    for names, prefix in kinds.items():
        more = next((others for others in kinds if names < others), None)
        if more is not None:
            part = min(more - names)
            other = checkpoint.name_in_files(kinds[more] + part)
            raise CheckpointError(f"{_lacks(checkpoint, prefix + part)} Another layer has it: {other}.")


def _lacks(checkpoint: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.config_folder} lacks the tensor {checkpoint.name_in_files(name)}.")
