"""A model's attention geometry, from `config.json` and the tensor shapes, each checked against the other."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.checkpoint import FLOAT_DTYPES, Checkpoint, Tensor
from model.checkpoint.folder import json_text
from model.errors import CheckpointError
from model.families import Family, find_family

PACKED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|absmax|quant_map|SCB)(\.|$)")


@dataclass(frozen=True)
class Geometry:
    """The sizes that attention is made of, and the tensors that depend on the number of K/V heads."""

    model_type: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    kv_tensors: tuple[str, ...]
    """K and V weights and biases of all layers: rows are `n_kv_heads` x `head_dim`. Layer by layer."""

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
    config = checkpoint.config
    family = find_family(config.get("model_type"))
    _refuse_quantised(checkpoint)
    n_layers = _positive(config, "num_hidden_layers")
    n_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    layers = _attention_tensors(family, checkpoint.tensors)
    if len(layers) != n_layers or max(layers) >= n_layers:
        raise CheckpointError(
            f"config.json says num_hidden_layers = {n_layers}, but the weights hold attention for {len(layers)} "
            f"layers{_gaps(layers, n_layers)}; they do not belong together."
        )
    q = layers[0].get(f"{family.query}.weight")
    if q is None or len(q.shape) != 2 or q.shape[0] % n_heads:
        raise CheckpointError(
            f"config.json says num_attention_heads = {n_heads}, but layer 0's {family.query}.weight "
            f"{'is missing' if q is None else f'has shape {q.shape}, not that many equal heads'}."
        )
    head_dim = _checked_head_dim(config, q.shape[0] // n_heads, hidden_size // n_heads, q)
    k = layers[0].get(f"{family.key}.weight")
    n_kv_heads = k.shape[0] // head_dim if k is not None and k.shape else 0
    for layer in range(n_layers):
        _check_layer(family, layer, layers[layer], n_heads, max(n_kv_heads, 1), head_dim, hidden_size)
    _check_n_kv_heads(config, family, n_heads, n_kv_heads)
    kv_tensors = tuple(
        layers[layer][part].name
        for layer in range(n_layers)
        for part in _kv_parts(family)
        if part in layers[layer]
    )  # fmt: skip
    return Geometry(family.model_type, n_layers, n_heads, n_kv_heads, head_dim, hidden_size, kv_tensors)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive whole number.")
    return value


def _kv_parts(family: Family) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in (family.key, family.value) for kind in ("weight", "bias"))


def _attention_tensors(family: Family, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return layer → part of the name → tensor. Any tensor that looks like attention but does not fit is refused."""
    pattern = re.compile(family.attention)
    projections = (family.query, family.key, family.value, family.output)
    known = {f"{name}.{kind}" for name in projections for kind in ("weight", "bias")} | set(family.not_per_head)
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match and match["part"] in known:
            parts = layers[int(match["layer"])]
            if match["part"] in parts:
                raise CheckpointError(
                    f"the tensors {parts[match['part']].name} and {name} claim the same place; remove one."
                )
            parts[match["part"]] = tensor
        elif match or re.search(r"attn\.|attention\.|[._](k|v|kv|qkv)_proj\.", name):
            raise CheckpointError(
                f"the tensor {name} (shape {tensor.shape}) is attention in a layout that "
                f"model_type {family.model_type!r} does not have; refused rather than guessed."
            )
    return layers


def _gaps(layers: Mapping[int, object], n_layers: int) -> str:
    first_missing = next(layer for layer in range(len(layers) + 1) if layer not in layers)
    if first_missing < n_layers:
        return f" (layer {first_missing} is missing)"
    return f" (layer {max(layers)} is one too many)"


def _checked_head_dim(config: Mapping[str, Any], found: int, implied: int, q: Tensor) -> int:
    stated = config.get("head_dim")
    expected = implied if stated is None else stated
    if type(expected) is not int or found != expected:
        source = "hidden_size / num_attention_heads" if stated is None else "head_dim"
        raise CheckpointError(
            f"config.json says {source} = {expected}, but {q.name} has shape {q.shape}, which means {found}; "
            "they do not belong together."
        )
    return found


def _check_layer(
    family: Family, layer: int, parts: Mapping[str, Tensor], n_heads: int, n_kv_heads: int, head_dim: int, hidden: int
) -> None:
    rows = {family.query: n_heads, family.key: n_kv_heads, family.value: n_kv_heads}
    expected = {f"{name}.weight": (n * head_dim, hidden) for name, n in rows.items()}
    expected[f"{family.output}.weight"] = (hidden, n_heads * head_dim)
    for part, shape in expected.items():
        if part not in parts:
            raise CheckpointError(f"layer {layer} has no {part}; the checkpoint is incomplete.")
        _check_tensor(parts[part], shape)
    for name, n in rows.items():
        if f"{name}.bias" in parts:
            _check_tensor(parts[f"{name}.bias"], (n * head_dim,))
    if (f"{family.key}.bias" in parts) != (f"{family.value}.bias" in parts):
        raise CheckpointError(f"layer {layer} has a bias on one of K and V only; the checkpoint is incomplete.")


def _check_tensor(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.name} has shape {tensor.shape}, but config.json and the other layers mean {shape}; "
            "they do not belong together."
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{tensor.name} is {tensor.dtype}: quantised or packed weights cannot be merged; "
            f"start from the original model in {', '.join(FLOAT_DTYPES)}."
        )


def _check_n_kv_heads(config: Mapping[str, Any], family: Family, n_heads: int, found: int) -> None:
    key = "num_key_value_heads"
    if config.get(key) is not None:
        stated, how = config[key], f"{key} = {config[key]}"
    elif key in config or family.absent_n_kv_heads is None:
        stated, how = n_heads, f"no {key}, which means {n_heads}"
    else:
        stated, how = (
            family.absent_n_kv_heads,
            f"no {key}, which {family.model_type} takes as {family.absent_n_kv_heads}",
        )
    if type(stated) is not int or stated != found:
        raise CheckpointError(
            f"config.json says {how}, but the weights hold {found} K/V heads; set {key} to what is true."
        )
    if n_heads % found:
        raise CheckpointError(f"the weights hold {found} K/V heads, which do not divide {n_heads} query heads.")


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    advice = "merging packed numbers gives garbage; start from the original, unquantised model."
    if checkpoint.config.get("quantization_config"):
        method = checkpoint.config["quantization_config"]
        name = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
        raise CheckpointError(f"config.json has a quantization_config ({name}): {advice}")
    for name in checkpoint.tensors:
        if PACKED.search(name):
            raise CheckpointError(f"the tensor {name} belongs to quantised weights: {advice}")


def with_n_kv_heads(config_text: bytes, n_kv_heads: int) -> bytes:
    """Return `config.json` with `num_key_value_heads` set; every other key, its spelling and its order are kept."""
    config = json.loads(config_text)
    if config.get("num_key_value_heads") == n_kv_heads:
        return config_text
    config["num_key_value_heads"] = n_kv_heads
    return json_text(config)
