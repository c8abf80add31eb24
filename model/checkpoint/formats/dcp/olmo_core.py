"""Derive the Hugging Face config of an OLMo 2 from OLMo-core's own `config.json`.

That file describes a training run. Its entry `model` lists the settings class by class, with defaults and without
settings that are None (allenai/OLMo-core, `config.py`; `nn/transformer/config.py`, `nn/attention`,
`nn/feed_forward.py`, `nn/layer_norm.py`, `nn/rope.py`). Its `nn/hf/config.py` defines which settings make an OLMo 2.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from model.checkpoint.hf_config import dtype_settings, rope_entries
from model.checkpoint.tensor import TensorInfo
from model.common import checks
from model.common.errors import CheckpointError

_RMS = ("rms", "fused_rms")
_NORM = {"name": _RMS, "bias": (False,), "elementwise_affine": (True, None), "full_precision": (True, None)}

# Per part: the settings that must have one of these values for the model to be an OLMo 2.
REQUIRED: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {"name": ("default", None)},
    "model.block": {"name": ("reordered_norm",)},
    "model.block.attention": {"name": ("default", None), "bias": (False,), "use_head_qk_norm": (False, None)},
    "model.block.attention.rope": {
        "name": ("default", None), "full_precision": (True, None), "no_global_rope": (False, None),
    },
    "model.block.attention.qk_norm": _NORM,
    "model.block.layer_norm": _NORM,
    "model.block.feed_forward": {"name": ("default", None), "bias": (False,), "activation": ("silu", None)},
    "model.lm_head": {"name": ("default", None), "bias": (False,)},
    "model.lm_head.layer_norm": _NORM,
}  # fmt: skip

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# READ: the settings that are read below. FREE: the settings that do not change the output of a trained model.
READ = {
    "model": {"d_model", "vocab_size", "n_layers", "tie_word_embeddings"},
    "model.block.attention": {"n_heads", "n_kv_heads"},
    "model.block.attention.rope": {"theta"},
    "model.block.feed_forward": {"hidden_size"},
}
FREE = {
    "_CLASS_", "dtype", "dropout", "eps", "backend", "use_flash", "loss_implementation", "init_method", "init_seed",
    "init_std", "embedding_init_std", "freeze_params", "compile", "dp_config", "tp_config", "float8_config",
    "ac_config",
}  # fmt: skip


def is_olmo_core(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is OLMo-core's rather than Hugging Face's."""
    return "model_type" not in config and isinstance(config.get("model"), dict) and "d_model" in config["model"]


def olmo2_config(
    path: Path, run: Mapping[str, Any], tensors: Iterable[TensorInfo]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the Hugging Face config of a run's model, and notes for the user.

    Raises CheckpointError if the meaning of any setting is unknown.
    """
    parts = _parts(path, run)
    model, attention = parts["model"], parts["model.block.attention"]
    eps = [_number(path, f"{place}.eps", parts[place].get("eps")) for place in REQUIRED if REQUIRED[place] is _NORM]
    if len(set(eps)) > 1:
        _refuse(path, "eps", eps)
    n_heads = _positive(path, attention, "n_heads")
    length, length_key = _trained_length(path, run)
    tokenizer = _table(_table(run, "dataset"), "tokenizer")
    config = {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_act": "silu",
        "hidden_size": _positive(path, model, "d_model"),
        "intermediate_size": _positive(path, parts["model.block.feed_forward"], "hidden_size"),
        "num_hidden_layers": _positive(path, model, "n_layers"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": _positive(path, attention, "n_kv_heads") if "n_kv_heads" in attention else n_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": eps[0],
        "vocab_size": _positive(path, model, "vocab_size"),
        "attention_bias": False,
        "tie_word_embeddings": model.get("tie_word_embeddings") is True,
        **rope_entries(_number(path, "theta", parts["model.block.attention.rope"].get("theta")), None),
        **{key: token if type(token := tokenizer.get(key)) is int else None for key in _TOKENS},
        **dtype_settings(tensors),
    }
    return config, (
        f"config.json is derived from OLMo-core's {path.name}; max_position_embeddings = {length} is its {length_key}.",
        "the tokenizer is not in the checkpoint: copy the files of "
        f"{tokenizer.get('identifier', 'the one trained with')}.",
    )


def _parts(path: Path, run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the model's parts by their path in `model`, each without settings that are None."""
    parts: dict[str, dict[str, Any]] = {}
    for place, required in REQUIRED.items():
        above, _, name = place.rpartition(".")
        part = parts[above].pop(name, None) if above else run[name]
        if not isinstance(part, dict):
            _refuse(path, place, part)
        part = {key: value for key, value in part.items() if value is not None}
        if place == "model.block" and "sequence_mixer" in part:  # its name since OLMo-core 2.5
            part["attention"] = part.pop("sequence_mixer")
        parts[place] = part
        for key, possible in required.items():
            if not any(type(part.get(key)) is type(value) and part.get(key) == value for value in possible):
                _refuse(path, f"{place}.{key}", part.get(key))
    for place, part in parts.items():
        for key in part.keys() - REQUIRED[place].keys() - READ.get(place, set()) - FREE:
            _refuse(path, f"{place}.{key}", part[key])
    return parts


def _trained_length(path: Path, run: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of tokens of a training sequence, and the key that states it."""
    module, data = _table(run, "train_module"), _table(run, "dataset")
    if data.get("sequence_length") is not None:
        return _positive(path, data, "sequence_length"), "dataset.sequence_length"
    return _positive(path, module, "max_sequence_length"), "train_module.max_sequence_length"


def _table(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = part.get(key)
    return value if isinstance(value, dict) else {}


def _positive(path: Path, part: Mapping[str, Any], key: str) -> int:
    value = part.get(key)
    if not checks.is_whole_number(value):
        _refuse(path, key, value)
    return value


def _number(path: Path, key: str, value: Any) -> float:
    if not checks.is_finite(value) or value <= 0:
        _refuse(path, key, value)
    return float(value)


def _refuse(path: Path, place: str, value: Any) -> NoReturn:
    raise CheckpointError(
        f"{path} is OLMo-core's; with {place} = {str(value)[:80]!r} it is not certain that the model is an OLMo 2: put "
        "the Hugging Face config.json of the model into the folder with .metadata."
    )
