"""What the Llama code needs to know of a checkpoint, read from `config.json`. What it does not implement is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.common import checks
from model.common.errors import CheckpointError
from model.decoder.rope import Rope, read_rope
from model.families import FAMILIES
from model.families.family import Family

NATIVE_FAMILIES = ("llama", "mistral", "qwen2")
MOST_LAYERS = 10_000
"""More are taken for a mistake: each would be built before a weight is read."""
ABSENT_WINDOW = 4096
"""What the config classes of Mistral and Qwen2 take an absent `sliding_window` for (transformers 5.23)."""


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
    family = FAMILIES[str(model_type)]
    assert isinstance(family, Family), "none of these wraps another"
    config = {**family.default_sizes, **config}
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"the activation {checks.show(activation)} is not implemented; silu (SwiGLU) is.")
    n_heads, hidden_size = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    n_layers = checks.whole_number(config["num_hidden_layers"], "config.json has num_hidden_layers", most=MOST_LAYERS)
    head_dim = hidden_size // n_heads if config.get("head_dim") is None else _size(config, "head_dim")
    biased, mlp_biased = _flag(config, "attention_bias"), _flag(config, "mlp_bias")
    return LlamaConfig(
        model_type=str(model_type),
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_n_kv_heads(config, family, n_heads),
        head_dim=head_dim,
        rms_norm_eps=checks.number(config.get("rms_norm_eps", 1e-6), "config.json has rms_norm_eps"),
        qkv_bias=model_type == "qwen2" or (biased and model_type == "llama"),
        o_bias=biased and model_type == "llama",
        mlp_bias=mlp_biased and model_type == "llama",
        tied=_flag(config, "tie_word_embeddings"),
        windows=_windows(config, n_layers),
        rope=read_rope(config, head_dim),
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    return checks.size(config.get(key), f"config.json has {key}")


def _flag(config: Mapping[str, Any], key: str) -> bool:
    return checks.flag(config.get(key), f"config.json has {key}")


def _n_kv_heads(config: Mapping[str, Any], family: Family, n_heads: int) -> int:
    """Return the number that the family's config class makes of the key, of its absence, or of null."""
    key = family.keys.n_kv_heads
    assumed = family.null_n_kv_heads if key in config else family.default_n_kv_heads
    if config.get(key) is None and assumed != "refused":
        return n_heads if assumed == "n_heads" else assumed
    n_kv_heads = _size(config, key)
    if n_heads % n_kv_heads:
        raise CheckpointError(f"config.json has {key} = {n_kv_heads}, which does not divide {n_heads} query heads.")
    return n_kv_heads


def _windows(config: Mapping[str, Any], n_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window as transformers' classes read it.

    Mistral: `sliding_window` for all layers. Qwen2: only with `use_sliding_window`, from layer `max_window_layers`
    on, or as `layer_types` says. Of both, null means none, and an absent key 4096. Llama has none.
    """
    everywhere = (None,) * n_layers
    if config["model_type"] == "llama":
        return everywhere
    window: int | None = config.get("sliding_window", ABSENT_WINDOW)
    if window is not None:
        window = checks.whole_number(window, "config.json has sliding_window")
    if config["model_type"] == "mistral":
        return (window,) * n_layers
    slides = _sliding_layers(config, n_layers)
    if _flag(config, "use_sliding_window") and window is not None:
        return tuple(window if slide else None for slide in slides)
    if config.get("layer_types") is not None and any(slides):
        raise CheckpointError(
            "config.json's layer_types names sliding_attention, but there is no sliding window: set use_sliding_window "
            "and sliding_window, or name all layers full_attention."
        )
    return everywhere


def _sliding_layers(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return which layers of a Qwen2 have the window, where there is one."""
    kinds = config.get("layer_types")
    if kinds is None:
        first = checks.whole_number(config.get("max_window_layers", 28), "config.json has max_window_layers", least=0)
        return [layer >= first for layer in range(n_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != n_layers or not all(kind in known for kind in kinds):
        raise CheckpointError(
            f"config.json has layer_types = {checks.show(kinds)}; it must say of each of {n_layers} layers "
            f"{' or '.join(known)}."
        )
    return [kind == "sliding_attention" for kind in kinds]
