"""What the Llama code needs to know of a checkpoint, read from `config.json`. What it does not implement is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import CheckpointError
from model.families import load_family
from model.families.family import Family
from model.rope import Rope, read_rope

NATIVE_FAMILIES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama-like decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    """Whether the output head is the embedding."""
    windows: tuple[int | None, ...]
    """Per layer, how many tokens back (itself included) a token sees; None for all."""
    rope: Rope


def read_llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Read `config.json`. Raises CheckpointError for what the code does not implement, by name."""
    model_type = config.get("model_type")
    if model_type not in NATIVE_FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} has no native code; implemented are: {', '.join(NATIVE_FAMILIES)}."
        )
    family = load_family(str(model_type))
    assert isinstance(family, Family), "none of these wraps another"
    config = {**family.absent_sizes, **config}
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"the activation {activation!r} is not implemented; silu (SwiGLU) is.")
    n_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
    biased = bool(config.get("attention_bias", False))
    return LlamaConfig(
        model_type=str(model_type),
        vocab_size=_size(config, "vocab_size"),
        hidden_size=config["hidden_size"],
        intermediate_size=_size(config, "intermediate_size"),
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=model_type == "qwen2" or (biased and model_type == "llama"),
        o_bias=biased and model_type == "llama",
        mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config),
        rope=read_rope(config, head_dim),
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json has {key} = {value!r}; running the model needs a positive whole number.")
    return value


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's sliding window as transformers' classes read it.

    Mistral: `sliding_window` for all layers. Qwen2: only with `use_sliding_window`, from layer `max_window_layers`
    on, or as `layer_types` says. Llama has none.
    """
    n_layers: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window")
    if window is None or config["model_type"] == "llama":
        return (None,) * n_layers
    if config["model_type"] == "mistral":
        return (window,) * n_layers
    if not config.get("use_sliding_window", False):
        return (None,) * n_layers
    first, kinds = config.get("max_window_layers", 28), config.get("layer_types")
    slides = [kind == "sliding_attention" for kind in kinds] if kinds else [i >= first for i in range(n_layers)]
    return tuple(window if slide else None for slide in slides)
