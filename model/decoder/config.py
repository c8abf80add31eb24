"""Read the native decoder's settings from `config.json`.

Models with settings that it does not implement run in transformers' classes (`is_native`). Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.checkpoint.latent_norm import LatentNorm, read_latent_norm
from model.common import checks
from model.common.checks import config_size
from model.common.errors import CheckpointError, NotNativeError
from model.decoder.rope_settings import Rope, read_rope
from model.families import FAMILIES, NATIVE_FAMILIES
from model.families.family import Family

MAX_LAYERS = 10_000
"""Limit of the number of layers. Every layer is built before a weight is read, so a wrong number would take hours."""
DEFAULT_WINDOW = 4096
"""The default of an absent `sliding_window` in the config classes of Mistral and Qwen2 (transformers 5.23)."""


@dataclass(frozen=True)
class LatentShape:
    """The sizes of latent attention without a norm of the latent, as a `config.json` gives them.

    `convert.latent.sizes.LatentSizes` are the sizes that a conversion writes there.
    """

    latent_dim: int
    """`kv_lora_rank` without the constant channel."""
    qk_rope_head_dim: int
    """Dimensions of the rotated key."""
    qk_nope_head_dim: int
    """Unrotated dimensions of a query head."""
    v_head_dim: int
    """Dimensions of a value head."""
    gain: float
    """Factor of the latent (`LatentNorm.gain`)."""

    @property
    def qk_head_dim(self) -> int:
        """Dimensions of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and settings of a Llama-like decoder."""

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
    """Whether the embedding is also the LM head."""
    windows: tuple[int | None, ...]
    """Per layer, the number of tokens that a token attends to, itself included; None for all."""
    rope: Rope
    latent: LatentShape | None = None
    """Set for latent attention. Then `head_dim` is the size of a query head."""

    @property
    def cached_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and their sizes in the KV cache: of keys and values, or of the rotated key and the latent."""
        if self.latent is not None:
            return (1, self.latent.qk_rope_head_dim), (1, self.latent.latent_dim)
        return (self.n_kv_heads, self.head_dim), (self.n_kv_heads, self.head_dim)


def is_native(config: Mapping[str, Any]) -> bool:
    """Return whether the native decoder runs the model of a `config.json`; otherwise transformers' class does.

    It runs NATIVE_FAMILIES, and latent attention whose norm is undone. A bad value does not matter here:
    `read_llama_config` raises its error when the model is built.
    """
    try:
        read_llama_config(config)
    except NotNativeError:
        return False
    except CheckpointError:
        return True
    return True


def read_llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the settings in `config.json`.

    Raises NotNativeError for a family or a setting that only transformers' class implements, and CheckpointError for a
    bad value.
    """
    model_type, norm = config.get("model_type"), read_latent_norm(config)
    if norm is not None:
        return _read_latent_config(config, norm)
    if model_type not in NATIVE_FAMILIES:
        raise NotNativeError(
            f"model_type {model_type!r} has no native code; implemented are: {', '.join(NATIVE_FAMILIES)}."
        )
    family = FAMILIES[str(model_type)]
    assert isinstance(family, Family), "none of these wraps another"
    config = {**family.default_sizes, **config}
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        error = NotNativeError if isinstance(activation, str) else CheckpointError
        raise error(f"the activation {checks.short_repr(activation)} is not implemented; silu (SwiGLU) is.")
    if config.get("is_causal") is False:
        raise CheckpointError("config.json has is_causal = false; attention to later tokens is not implemented.")
    n_heads, hidden_size = config_size(config, "num_attention_heads"), config_size(config, "hidden_size")
    n_layers = _n_layers(config)
    head_dim = hidden_size // n_heads if config.get("head_dim") is None else config_size(config, "head_dim")
    attention_bias, mlp_bias = _flag(config, "attention_bias"), _flag(config, "mlp_bias")
    return LlamaConfig(
        model_type=str(model_type),
        vocab_size=config_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config_size(config, "intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=_n_kv_heads(config, family, n_heads),
        head_dim=head_dim,
        rms_norm_eps=checks.number(config.get("rms_norm_eps", 1e-6), "config.json has rms_norm_eps"),
        qkv_bias=model_type == "qwen2" or (attention_bias and model_type == "llama"),
        o_bias=attention_bias and model_type == "llama",
        mlp_bias=mlp_bias and model_type == "llama",
        tied=_flag(config, "tie_word_embeddings"),
        windows=_windows(config, n_layers),
        rope=read_rope(config, head_dim),
    )


def _n_layers(config: Mapping[str, Any]) -> int:
    key = "num_hidden_layers"
    return checks.whole_number(config.get(key), f"config.json has {key}", most=MAX_LAYERS)


def _read_latent_config(config: Mapping[str, Any], norm: LatentNorm) -> LlamaConfig:
    """Return the settings of DeepSeek-V3's class with dense layers, as `convert mha-to-mla` writes them.

    Raises CheckpointError for any other setting of that class.
    """
    n_layers = _n_layers(config)
    expected = {
        "q_lora_rank": (None,), "rope_interleave": (True, None), "hidden_act": ("silu",),
        "attention_bias": (norm.kind == "bias",), "tie_word_embeddings": (False,), "first_k_dense_replace": (n_layers,),
    }  # fmt: skip
    for key, values in expected.items():
        if config.get(key) not in values:
            raise CheckpointError(
                f"config.json has {key} = {checks.short_repr(config.get(key))}, where convert mha-to-mla writes "
                f"{checks.short_repr(values[0])}; convert the model again."
            )
    n_heads, qk_nope_head_dim, v_head_dim = (
        config_size(config, key) for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    return LlamaConfig(
        model_type="deepseek_v3",
        vocab_size=config_size(config, "vocab_size"),
        hidden_size=config_size(config, "hidden_size"),
        intermediate_size=config_size(config, "intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=qk_nope_head_dim + norm.qk_rope_head_dim,
        rms_norm_eps=checks.number(config.get("rms_norm_eps", 1e-6), "config.json has rms_norm_eps"),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tied=False,
        windows=(None,) * n_layers,
        rope=read_rope(config, norm.qk_rope_head_dim),
        latent=LatentShape(norm.latent_dim, norm.qk_rope_head_dim, qk_nope_head_dim, v_head_dim, norm.gain),
    )


def _flag(config: Mapping[str, Any], key: str) -> bool:
    return checks.flag(config.get(key), f"config.json has {key}")


def _n_kv_heads(config: Mapping[str, Any], family: Family, n_heads: int) -> int:
    """Return the number of K/V heads as the family's config class does, also for an absent or null key."""
    key = family.keys.n_kv_heads
    assumed = family.assumed_n_kv_heads(config, n_heads)
    if config.get(key) is None and assumed is not None:
        return assumed
    n_kv_heads = config_size(config, key)
    if n_heads % n_kv_heads:
        raise CheckpointError(f"config.json has {key} = {n_kv_heads}, which does not divide {n_heads} query heads.")
    return n_kv_heads


def _windows(config: Mapping[str, Any], n_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by the rules of transformers' classes.

    Mistral: `sliding_window` for all layers, or for those that `layer_types` names: transformers opens it as Ministral
    then. Qwen2: only with `use_sliding_window`, in the layers from `max_window_layers` on or those that `layer_types`
    names. For both, null means no window, and an absent key 4096. Llama has none.
    """
    everywhere = (None,) * n_layers
    if config["model_type"] == "llama":
        return everywhere
    window: int | None = config.get("sliding_window", DEFAULT_WINDOW)
    if window is not None:
        window = checks.whole_number(window, "config.json has sliding_window")
    if config["model_type"] == "mistral" and config.get("layer_types") is None:
        return (window,) * n_layers
    slides = _sliding_layers(config, n_layers)
    if (config["model_type"] == "mistral" or _flag(config, "use_sliding_window")) and window is not None:
        return tuple(window if slide else None for slide in slides)
    if config.get("layer_types") is not None and any(slides):
        raise CheckpointError(
            "config.json's layer_types names sliding_attention, but there is no sliding window: set sliding_window "
            "(qwen2: also use_sliding_window), or name all layers full_attention."
        )
    return everywhere


def _sliding_layers(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return for each layer whether it has the window, if the model has one."""
    kinds = config.get("layer_types")
    if kinds is None:
        first = checks.whole_number(config.get("max_window_layers", 28), "config.json has max_window_layers", least=0)
        return [layer >= first for layer in range(n_layers)]
    supported = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != n_layers or not all(kind in supported for kind in kinds):
        raise CheckpointError(
            f"config.json has layer_types = {checks.short_repr(kinds)}; it must give for each of {n_layers} layers "
            f"{' or '.join(supported)}."
        )
    return [kind == "sliding_attention" for kind in kinds]
