"""Read a model's attention geometry from `config.json` and the tensor shapes, and check each against the other."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.attention_layout import Layers, ModelLayout, Sizes, attention_tensors, find_attention
from model.checkpoint import FLOAT_DTYPES, Checkpoint
from model.checkpoint.latent_norm import read_latent_norm
from model.common import checks
from model.common.errors import CheckpointError, prefix_path
from model.completeness import check_complete
from model.families import Family, find_family
from model.families.family import Assumed, Switch, get_key

PACKED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|absmax|quant_map|SCB)(\.|$)")


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model's attention, and the position of its heads in the tensors."""

    model_type: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    attention: ModelLayout
    """The tensor rows that depend on the number of K/V heads, layer by layer."""
    n_rotary_pairs: tuple[int, ...] | None = None
    """Number of rotated pairs of a head's dimensions, layer by layer; None if the family's rotation is not known, or
    the number of rotated dimensions is odd."""
    text_config: str | None = None
    """The key of `config.json` that holds the language model's config; None if that is the top level."""
    alibi: bool = False
    """Whether each query head has a bias of its own by distance."""

    @property
    def family(self) -> Family:
        return self.attention.family

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_heads

    @property
    def legal_n_kv_heads(self) -> tuple[int, ...]:
        """The numbers of K/V heads that the model can be merged to: divisors of its own, if its class supports them."""
        candidates = () if self.family.only_multi_query else range(2, self.n_kv_heads)
        return tuple(sorted({1, *(n for n in candidates if self.n_kv_heads % n == 0), self.n_kv_heads}))

    @property
    def legal_repeats(self) -> tuple[int, ...]:
        """The larger numbers that the K/V heads can be repeated to, up to one per query head."""
        candidates = () if self.family.only_multi_query else range(self.n_kv_heads + 1, self.n_heads + 1)
        return tuple(n for n in candidates if n % self.n_kv_heads == 0 and self.n_heads % n == 0)

    def kv_cache_bytes_per_token(self, n_kv_heads: int, bytes_per_value: int = 2) -> int:
        """Return the bytes of one token in the KV cache of all layers."""
        return 2 * self.n_layers * n_kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model with K/V heads or with latent attention."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    """With latent attention, as many as query heads: each has keys and values of its own in memory."""
    head_dim: int
    """With latent attention, the size of a query head: its rotated and unrotated dimensions together."""
    hidden_size: int
    latent: tuple[int, int] | None = None
    """The sizes of the latent and of the rotated key, with latent attention."""
    v_head_dim: int = 0
    """The size of a value head, with latent attention."""


def read_sizes(checkpoint: Checkpoint) -> ModelSizes:
    """Return the sizes of a model. Raises CheckpointError as `read_geometry` does."""
    config = checkpoint.config
    if read_latent_norm(config) is None:
        geometry = read_geometry(checkpoint)
        return ModelSizes(
            geometry.n_layers, geometry.n_heads, geometry.n_kv_heads, geometry.head_dim, geometry.hidden_size
        )
    keys = ("num_hidden_layers", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "hidden_size")
    n_layers, n_heads, qk_nope_head_dim, qk_rope_head_dim, hidden_size = (_positive(config, key) for key in keys)
    latent, v_head_dim = (_positive(config, "kv_lora_rank"), qk_rope_head_dim), _positive(config, "v_head_dim")
    head_dim = qk_nope_head_dim + qk_rope_head_dim
    return ModelSizes(n_layers, n_heads, n_heads, head_dim, hidden_size, latent, v_head_dim)


def read_geometry(checkpoint: Checkpoint) -> Geometry:
    """Derive the geometry from the tensors, and check it against `config.json`.

    Raises CheckpointError if the two disagree, and for a layout that is not fully known.
    """
    with prefix_path(checkpoint.config_folder):
        return _read_geometry(checkpoint)


def _read_geometry(checkpoint: Checkpoint) -> Geometry:
    if read_latent_norm(checkpoint.config) is not None:
        raise CheckpointError(
            "this is an output of convert mha-to-mla, whose KV cache holds one latent for all heads, so there are no "
            "K/V heads to merge; use it as it is. `uptrain run` and `uptrain evaluate` take it."
        )
    match = find_family(checkpoint.config)
    family, config = match.family, {**match.family.default_sizes, **match.config}
    _refuse_quantised(checkpoint, config)
    _refuse_settings(config, family)
    n_layers = _positive(config, *family.keys.n_layers)
    n_heads = _positive(config, *family.keys.n_heads)
    hidden_size = _positive(config, family.keys.hidden_size)
    layers = attention_tensors(family, checkpoint.tensors)
    if not layers and any(name.startswith("encoder.") for name in checkpoint.tensors):
        raise CheckpointError(f"{checkpoint.path} holds an encoder without a decoder, so it has no KV cache to reduce.")
    if len(layers) != n_layers or max(layers) >= n_layers:
        gap = next(layer for layer in range(len(layers) + 1) if layer not in layers)
        detail = f"layer {gap} is missing" if gap < n_layers else f"layer {max(layers)} is one too many"
        raise CheckpointError(
            f"config.json says {_name(config, family.keys.n_layers)} = {n_layers}, but the weights hold attention for "
            f"{len(layers)} layers ({detail}); they do not match."
        )
    head_dim = _head_dim(config, family, layers, n_heads, hidden_size)
    n_kv_heads = _n_kv_heads(family, layers, n_heads, head_dim)
    attention = find_attention(family, Sizes(n_heads, max(n_kv_heads, 1), head_dim, hidden_size), layers)
    _check_n_kv_heads(config, family, n_heads, n_kv_heads)
    check_complete(attention, checkpoint, {**config, "model_type": family.model_type})
    return Geometry(
        model_type=match.model_type,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        attention=attention,
        n_rotary_pairs=_n_rotary_pairs(config, family, head_dim, n_layers),
        text_config=match.text_config,
        alibi=_has_alibi(config, family),
    )


def _n_rotary_pairs(config: Mapping[str, Any], family: Family, head_dim: int, n_layers: int) -> tuple[int, ...] | None:
    if _has_alibi(config, family):
        return (0,) * n_layers
    if family.positions.rotary_fraction is None:
        return None
    n_pairs, odd = divmod(int(head_dim * _rotary_fraction(config, family)), 2)
    if odd:
        return None  # the classes pair the last dimension in ways of their own
    return tuple(n_pairs if rotates else 0 for rotates in _rotating_layers(config, family, n_layers))


def _has_alibi(config: Mapping[str, Any], family: Family) -> bool:
    key = family.positions.alibi
    return key is not None and get_key(config, key) is True


def _rotary_fraction(config: Mapping[str, Any], family: Family) -> float:
    default = family.positions.rotary_fraction
    assert default is not None
    if not family.positions.partial_rotary:
        return default
    # transformers 5 takes a rope_scaling in place of rope_parameters.
    rope = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    keys = (f"{rope}.partial_rotary_factor", family.keys.partial_rotary_factor)
    key = next((key for key in keys if get_key(config, key) is not None), None)
    fraction = default if key is None else get_key(config, key)
    if not checks.is_finite(fraction) or not 0 < fraction <= 1:
        raise CheckpointError(f"config.json has {key} = {checks.short_repr(fraction)}; it must be between 0 and 1.")
    return float(fraction)


def _rotating_layers(config: Mapping[str, Any], family: Family, n_layers: int) -> list[bool]:
    """Return for each layer whether its heads are rotated, by the rules of Cohere2's and SmolLM3's config classes."""
    positions = family.positions
    if positions.null_window_rotates and config.get("sliding_window", 0) is None:
        return [True] * n_layers
    if positions.rotates_only is not None:
        return [kind == positions.rotates_only for kind in _layer_types(config, n_layers)]
    if positions.no_rope_every is None:
        return [True] * n_layers
    listed, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval", positions.no_rope_every)
    if listed is None and checks.is_whole_number(every):
        listed = [(layer + 1) % every != 0 for layer in range(n_layers)]
    if not isinstance(listed, list) or len(listed) != n_layers or not all(value in (0, 1) for value in listed):
        raise CheckpointError(
            f"config.json has no_rope_layers = {checks.short_repr(listed)}; it must give for each of {n_layers} "
            "layers 1 (rotated) or 0."
        )
    return [bool(value) for value in listed]


def _layer_types(config: Mapping[str, Any], n_layers: int) -> list[str]:
    """Return the kind of attention of each layer: `layer_types`, or every `sliding_window_pattern`-th layer full."""
    kinds, every = config.get("layer_types"), config.get("sliding_window_pattern", 4)
    if kinds is None and checks.is_whole_number(every):
        return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(n_layers)]
    if kinds is None:
        raise CheckpointError(
            f"config.json has sliding_window_pattern = {checks.short_repr(every)}; it must be a whole number: every so "
            "many layers, one attends to the whole text."
        )
    if not isinstance(kinds, list) or len(kinds) != n_layers or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(
            f"config.json has layer_types = {checks.short_repr(kinds)}; it must name the attention of each of "
            f"{n_layers} layers."
        )
    return kinds


def _name(config: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return the name that the config uses for a size, of several possible ones; the first if it uses none."""
    return next((key for key in keys if get_key(config, key) is not None), keys[0])


def _positive(config: Mapping[str, Any], *keys: str) -> int:
    key = _name(config, keys)
    return checks.size(get_key(config, key), f"config.json has {key}")


def _head_dim(config: Mapping[str, Any], family: Family, layers: Layers, n_heads: int, hidden_size: int) -> int:
    """Return the size of a head from layer 0's query projection, or from its output projection if Q, K, V are fused."""
    name, axis = (family.names.query, 0) if family.names.fused is None else (family.names.output, 1)
    part = f"{family.names.attention[0]}.{name}.weight"
    tensor = layers[0].get(part)
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[axis] % n_heads or not tensor.shape[axis]:
        raise CheckpointError(
            f"config.json says {_name(config, family.keys.n_heads)} = {n_heads}, but layer 0's {part} "
            f"{'is missing' if tensor is None else f'has shape {tensor.shape}, not that many equal heads'}."
        )
    # An empty tensor would let a file of a few bytes claim any number of heads.
    if tensor.shape[1 - axis] != hidden_size:
        raise CheckpointError(
            f"config.json has a hidden size of {hidden_size}, but layer 0's {part} has shape {tensor.shape}; they do "
            "not match."
        )
    head_dim = tensor.shape[axis] // n_heads
    statement, stated = _stated_head_dim(config, family, hidden_size // n_heads)
    if type(stated) is not int or head_dim != stated:
        raise CheckpointError(
            f"config.json says {statement}, but {tensor.name} has shape {tensor.shape}, which means {head_dim}; "
            "they do not match."
        )
    return head_dim


def _stated_head_dim(config: Mapping[str, Any], family: Family, implied: int) -> tuple[str, Any]:
    """Return the config's statement of the head size, in words and as a number."""
    key = family.keys.head_dim
    if config.get(key) is not None:
        return f"{key} = {config[key]}", config[key]
    if key in config or family.default_head_dim is None:
        hidden, heads = family.keys.hidden_size, _name(config, family.keys.n_heads)
        return f"{hidden} / {heads} = {implied}", implied
    return f"no {key}, which {family.model_type} takes as {family.default_head_dim}", family.default_head_dim


def _n_kv_heads(family: Family, layers: Layers, n_heads: int, head_dim: int) -> int:
    """Return the number of K/V heads in layer 0; 0 if it is missing or not whole, which other checks refuse."""
    name = family.names.key if family.names.fused is None else family.names.fused
    tensor = layers[0].get(f"{family.names.attention[0]}.{name}.weight")
    if tensor is None or not tensor.shape:
        return 0
    n = tensor.shape[0] // head_dim
    return n if family.names.fused is None else (n - n_heads) // 2


def _check_n_kv_heads(config: Mapping[str, Any], family: Family, n_heads: int, n_kv_heads: int) -> None:
    stated, statement = _stated_n_kv_heads(config, family, n_heads, n_kv_heads)
    if type(stated) is not int or stated != n_kv_heads:
        key = family.keys.n_kv_heads if family.switch is None else family.switch.key
        raise CheckpointError(
            f"config.json says {statement}, but the weights hold {n_kv_heads} K/V heads; set {key} to the true number."
        )
    if n_heads % n_kv_heads:
        raise CheckpointError(f"the weights hold {n_kv_heads} K/V heads, which do not divide {n_heads} query heads.")


def _stated_n_kv_heads(config: Mapping[str, Any], family: Family, n_heads: int, n_kv_heads: int) -> tuple[Any, str]:
    """Return the number of K/V heads that the class derives from the config, and the config's statement in words.

    `n_kv_heads`: the number in the weights, for messages.
    """
    key = family.keys.n_kv_heads
    if family.switch is not None:
        n, statement = _switched(config, family.switch)
        if n is not None:
            return n_heads if n == "n_heads" else n, statement
    if get_key(config, key) is not None:
        return get_key(config, key), f"{key} = {get_key(config, key)}"
    assumed = family.assumed_n_kv_heads(config, n_heads)
    spelt = f"{key} = null" if key in config else f"no {key}"
    if assumed is None:
        raise CheckpointError(
            f"config.json says {spelt}, which the class of {family.model_type} refuses; the weights hold {n_kv_heads} "
            f"K/V heads, so set {key} to {n_kv_heads}."
        )
    return assumed, f"{spelt}, which {family.model_type} takes as {assumed}"


def _switched(config: Mapping[str, Any], switch: Switch) -> tuple[int | Assumed | None, str]:
    """Return the number of K/V heads that a switch selects, and its setting in words."""
    value = get_key(config, switch.key)
    setting = f"{switch.key} = {json.dumps(value)}" if value is not None else f"no {switch.key}"
    value = switch.default if value is None else value
    for possible, n in switch.values.items():
        if type(value) is type(possible) and value == possible:
            return n, setting
    options = ", ".join(map(json.dumps, switch.values))
    raise CheckpointError(f"config.json has {setting}; it can be {options}.")


def _refuse_settings(config: Mapping[str, Any], family: Family) -> None:
    if config.get("per_layer_config"):
        raise CheckpointError(
            "config.json has per_layer_config, sizes that differ from layer to layer; a conversion gives all layers "
            "the same number of K/V heads, so start from a model without it."
        )
    for key, (value, reason) in family.refused.items():
        if get_key(config, key) == value:
            raise CheckpointError(f"config.json has {key} = {json.dumps(value)}: {reason}")


def check_class_settings(config: Mapping[str, Any], family: Family, lm_head: bool) -> None:
    """Raise CheckpointError for a setting that the family's class in transformers ignores.

    With `lm_head`, settings that its LM head ignores count too.
    """
    for key, values in {**family.class_ignores, **(family.lm_head_ignores if lm_head else {})}.items():
        if (value := get_key(config, key)) not in values:
            raise CheckpointError(
                f"config.json has {key} = {checks.short_repr(value)}, which transformers' class of {family.model_type} "
                "ignores, so it cannot run the model."
            )


def _refuse_quantised(checkpoint: Checkpoint, text_config: Mapping[str, Any]) -> None:
    advice = "packed numbers cannot be merged; start from the original, unquantised model."
    for config in (checkpoint.config, text_config):
        for key in ("quantization_config", "compression_config"):  # compressed-tensors began with the latter
            if method := config.get(key):
                name = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
                floats = all(tensor.dtype in FLOAT_DTYPES for tensor in checkpoint.tensors.values())
                if floats and not any(PACKED.search(name) for name in checkpoint.tensors):
                    advice += f" (All tensors here are floating point. If they are the original's, remove {key}.)"
                raise CheckpointError(f"config.json has a {key} ({name}): {advice}")
    for name in checkpoint.tensors:
        if PACKED.search(name):
            raise CheckpointError(f"the tensor {name} belongs to quantised weights: {advice}")
