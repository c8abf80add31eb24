"""A model's attention geometry, from `config.json` and the tensor shapes, each checked against the other."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.checkpoint import Checkpoint
from model.checkpoint.folder import json_text
from model.errors import CheckpointError
from model.families import Family, find_family
from model.layout import KVHeads, Layers, Sizes, attention_tensors, find_kv_heads

PACKED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|absmax|quant_map|SCB)(\.|$)")


@dataclass(frozen=True)
class Geometry:
    """The sizes that attention is made of, and where the K/V heads lie."""

    model_type: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    kv_heads: tuple[KVHeads, ...]
    """Everything that depends on the number of K/V heads, layer by layer."""
    text_config: str | None = None
    """The key of `config.json` under which the language model's config stands; None if at the top."""

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_heads

    @property
    def legal_n_kv_heads(self) -> tuple[int, ...]:
        """The numbers of K/V heads this model can be merged to: the divisors of what it has."""
        return tuple(n for n in range(1, self.n_kv_heads + 1) if self.n_kv_heads % n == 0)

    def kv_cache_bytes_per_token(self, n_kv_heads: int, bytes_per_value: int = 2) -> int:
        """Bytes that one token takes in the KV cache of all layers, at 16 bits a value unless told otherwise."""
        return 2 * self.n_layers * n_kv_heads * self.head_dim * bytes_per_value


def read_geometry(checkpoint: Checkpoint) -> Geometry:
    """Derive the geometry from the tensors, and check it against `config.json`.

    Raises CheckpointError where the two disagree, and on layouts that are not understood in full.
    """
    found = find_family(checkpoint.config)
    family, config = found.family, {**found.family.absent_sizes, **found.config}
    _refuse_quantised(checkpoint, config)
    n_layers = _positive(config, "num_hidden_layers")
    n_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    layers = attention_tensors(family, found.others, checkpoint.tensors)
    if len(layers) != n_layers or max(layers) >= n_layers:
        raise CheckpointError(
            f"config.json says num_hidden_layers = {n_layers}, but the weights hold attention for {len(layers)} "
            f"layers{_gaps(layers, n_layers)}; they do not belong together."
        )
    head_dim = _head_dim(config, family, layers, n_heads, hidden_size)
    n_kv_heads = _n_kv_heads(family, layers, n_heads, head_dim)
    kv_heads = find_kv_heads(family, Sizes(n_heads, max(n_kv_heads, 1), head_dim, hidden_size), layers)
    _check_n_kv_heads(config, family, n_heads, n_kv_heads)
    return Geometry(found.model_type, n_layers, n_heads, n_kv_heads, head_dim, hidden_size, kv_heads, found.text_config)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive whole number.")
    return value


def _gaps(layers: Mapping[int, object], n_layers: int) -> str:
    first_missing = next(layer for layer in range(len(layers) + 1) if layer not in layers)
    if first_missing < n_layers:
        return f" (layer {first_missing} is missing)"
    return f" (layer {max(layers)} is one too many)"


def _head_dim(config: Mapping[str, Any], family: Family, layers: Layers, n_heads: int, hidden_size: int) -> int:
    """Return the size of a head: of layer 0's queries, or where those are fused, of what goes into the output."""
    name, axis = (family.query, 0) if family.fused is None else (family.output, 1)
    tensor = layers[0].get(f"{name}.weight")
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[axis] % n_heads or not tensor.shape[axis]:
        raise CheckpointError(
            f"config.json says num_attention_heads = {n_heads}, but layer 0's {name}.weight "
            f"{'is missing' if tensor is None else f'has shape {tensor.shape}, not that many equal heads'}."
        )
    found = tensor.shape[axis] // n_heads
    says, expected = _stated_head_dim(config, family, hidden_size // n_heads)
    if type(expected) is not int or found != expected:
        raise CheckpointError(
            f"config.json says {says}, but {tensor.name} has shape {tensor.shape}, which means {found}; "
            "they do not belong together."
        )
    return found


def _stated_head_dim(config: Mapping[str, Any], family: Family, implied: int) -> tuple[str, Any]:
    """Return what the config says, in words, and the size it means."""
    if config.get("head_dim") is not None:
        return f"head_dim = {config['head_dim']}", config["head_dim"]
    if "head_dim" in config or family.absent_head_dim is None:
        return f"hidden_size / num_attention_heads = {implied}", implied
    return f"no head_dim, which {family.model_type} takes as {family.absent_head_dim}", family.absent_head_dim


def _n_kv_heads(family: Family, layers: Layers, n_heads: int, head_dim: int) -> int:
    """Return what layer 0 holds; 0 where that is missing or no whole number, which other checks refuse."""
    tensor = layers[0].get(f"{family.key if family.fused is None else family.fused}.weight")
    if tensor is None or not tensor.shape:
        return 0
    return tensor.shape[0] // head_dim if family.fused is None else (tensor.shape[0] // head_dim - n_heads) // 2


def _check_n_kv_heads(config: Mapping[str, Any], family: Family, n_heads: int, found: int) -> None:
    key = "num_key_value_heads"
    if config.get(key) is not None:
        stated, how = config[key], f"{key} = {config[key]}"
    else:
        assumed = family.null_n_kv_heads if key in config else family.absent_n_kv_heads
        spelt = f"{key} = null" if key in config else f"no {key}"
        if assumed == "refused":
            raise CheckpointError(
                f"config.json says {spelt}, which the class of {family.model_type} refuses; the weights hold {found} "
                f"K/V heads, so set {key} to {found}."
            )
        stated = n_heads if assumed == "n_heads" else assumed
        how = f"{spelt}, which {family.model_type} takes as {stated}"
    if type(stated) is not int or stated != found:
        raise CheckpointError(
            f"config.json says {how}, but the weights hold {found} K/V heads; set {key} to what is true."
        )
    if n_heads % found:
        raise CheckpointError(f"the weights hold {found} K/V heads, which do not divide {n_heads} query heads.")


def _refuse_quantised(checkpoint: Checkpoint, text_config: Mapping[str, Any]) -> None:
    advice = "merging packed numbers gives garbage; start from the original, unquantised model."
    for config in (checkpoint.config, text_config):
        if config.get("quantization_config"):
            method = config["quantization_config"]
            name = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
            raise CheckpointError(f"config.json has a quantization_config ({name}): {advice}")
    for name in checkpoint.tensors:
        if PACKED.search(name):
            raise CheckpointError(f"the tensor {name} belongs to quantised weights: {advice}")


def with_n_kv_heads(config_text: bytes, n_kv_heads: int, text_config: str | None = None) -> bytes:
    """Return `config.json` with `num_key_value_heads` set; every other key, its spelling and its order are kept.

    `text_config` is as in `Geometry`.
    """
    config = json.loads(config_text)
    inner = config if text_config is None else config[text_config]
    if inner.get("num_key_value_heads") == n_kv_heads:
        return config_text
    inner["num_key_value_heads"] = n_kv_heads
    return json_text(config)
