"""Locate attention in a checkpoint's tensors: the shape of every part, and the rows of every head."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model.checkpoint import FLOAT_DTYPES, TensorInfo
from model.common.errors import CheckpointError
from model.families import Family
from model.families.family import HeadNorms

LOOKS_LIKE_ATTENTION = re.compile(r"(?i)attn\.|attention\.|[._](k|v|kv|qkv)_proj\.|query_key_value")
# What DDP, torch.compile, FSDP, DeepSpeed and PEFT put before the names of the model that they wrap.
TRAINING_PREFIXES = re.compile(r"(?:(?:module|_orig_mod|_fsdp_wrapped_module|_forward_module|base_model\.model)\.)+")
Kind = Literal["q", "k", "v"]
Layers = Mapping[int, Mapping[str, TensorInfo]]
"""Layer → part → tensor. A part is the tensor's name after `layers.0.`."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the shapes of attention."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int


@dataclass(frozen=True)
class Heads:
    """All heads of one kind in the weights, biases or norms of one attention module."""

    kind: Kind
    tensor_names: tuple[str, ...]
    """The tensor that holds the heads as rows, or one tensor per head."""
    first_row: int
    """Number of rows before the first head; above 0 only in a fused projection."""
    rows_per_head: int
    n: int
    heads_per_block: int
    """Number of consecutive heads before heads of another kind follow."""
    rows_per_block: int
    """Number of rows from the start of one such run to the start of the next."""

    @property
    def label(self) -> str:
        """A unique name. The tensor's name is not enough where heads of several kinds share a tensor."""
        return f"{self.tensor_names[0]} {self.kind}" if self.first_row else self.tensor_names[0]

    @property
    def rows(self) -> NDArray[np.intp]:
        """The rows of all heads, in the heads' order; for heads in one tensor."""
        assert len(self.tensor_names) == 1
        starts = np.array([self.tensor_and_row(head)[1] for head in range(self.n)], dtype=np.intp)
        return (starts[:, None] + np.arange(self.rows_per_head)).flatten()

    def tensor_and_row(self, head: int) -> tuple[str, int]:
        """Return the tensor that holds a head, and the head's first row in that tensor."""
        if len(self.tensor_names) > 1:
            return self.tensor_names[head], 0
        block, head_in_block = divmod(head, self.heads_per_block)
        return self.tensor_names[0], self.first_row + block * self.rows_per_block + head_in_block * self.rows_per_head


@dataclass(frozen=True)
class LayerLayout:
    """The attention of one layer of a family at given sizes. Names of tensors are parts."""

    shapes: Mapping[str, tuple[int, ...]]
    required: frozenset[str]
    heads: tuple[Heads, ...]
    """The K and V heads, and query heads in a fused tensor. Their order does not depend on the sizes."""


def make_layer_layout(family: Family, sizes: Sizes) -> LayerLayout:
    """Return the layout of a layer of a family, all optional parts included."""
    one = _one_attention(family, sizes)
    return LayerLayout(
        {f"{module}.{part}": shape for module in family.names.attention for part, shape in one.shapes.items()},
        frozenset(f"{module}.{part}" for module in family.names.attention for part in one.required),
        tuple(_prefixed(f"{module}.", heads) for module in family.names.attention for heads in one.heads),
    )


def _prefixed(prefix: str, heads: Heads) -> Heads:
    return replace(heads, tensor_names=tuple(prefix + part for part in heads.tensor_names))


def _one_attention(family: Family, sizes: Sizes) -> LayerLayout:
    """Return the same of one attention module of the layer; the names of parts lack the module's."""
    n_rows, heads = _fused(family, sizes) if family.names.fused else _separate(family, sizes)
    shapes: dict[str, tuple[int, ...]] = {
        f"{family.names.output}.weight": (sizes.hidden_size, sizes.n_heads * sizes.head_dim),
        f"{family.names.output}.bias": (sizes.hidden_size,),
    }
    for name, n in n_rows.items():
        shapes |= {f"{name}.weight": (n, sizes.hidden_size), f"{name}.bias": (n,)}
    required = frozenset(part for part in shapes if part.endswith(".weight"))
    norms = family.head_norms
    if norms is not None:
        key_norms = _norm_shapes(norms.key, norms, sizes.n_kv_heads, sizes.head_dim)
        shapes |= key_norms | _norm_shapes(norms.query, norms, sizes.n_heads, sizes.head_dim)
        if norms.differs_by_head:
            rows = 1 if norms.layout == "matrix" else sizes.head_dim
            heads.append(_contiguous("k", tuple(key_norms), rows, sizes.n_kv_heads))
    return LayerLayout(shapes, required, tuple(heads))


def _contiguous(kind: Kind, tensors: tuple[str, ...], rows_per_head: int, n: int) -> Heads:
    """Return heads that fill their tensors, one after another."""
    return Heads(kind, tensors, 0, rows_per_head, n, heads_per_block=n, rows_per_block=n * rows_per_head)


def projections(family: Family, sizes: Sizes, parameter: str, prefix: str) -> tuple[Heads, Heads, Heads]:
    """Return the query, key and value heads of one attention module, in its weights or its biases.

    `parameter`: `weight` or `bias`. `prefix`: the beginning of the module's tensor names.
    """
    if family.names.fused:
        _, heads = _fused(family, sizes)
        q, k, v = (_prefixed(prefix, each) for each in heads if each.tensor_names[0].endswith(parameter))
        return q, k, v
    q, k, v = (
        _contiguous(kind, (f"{prefix}{name}.{parameter}",), sizes.head_dim, n)
        for kind, name, n in _kinds(family, sizes)
    )
    return q, k, v


def _kinds(family: Family, sizes: Sizes) -> tuple[tuple[Kind, str, int], ...]:
    """Return the three kinds of heads: the name of their projection, and their number."""
    return (
        ("q", family.names.query, sizes.n_heads),
        ("k", family.names.key, sizes.n_kv_heads),
        ("v", family.names.value, sizes.n_kv_heads),
    )


def _separate(family: Family, sizes: Sizes) -> tuple[dict[str, int], list[Heads]]:
    """Return the number of rows of each projection, and the K/V heads in weights and biases."""
    heads = [
        _contiguous(kind, (f"{name}.{parameter}",), sizes.head_dim, n)
        for kind, name, n in _kinds(family, sizes)
        for parameter in ("weight", "bias")
        if kind != "q"
    ]
    return {name: n * sizes.head_dim for _, name, n in _kinds(family, sizes)}, heads


def _fused(family: Family, sizes: Sizes) -> tuple[dict[str, int], list[Heads]]:
    """Return the same for a fused projection. Its rows are [q | k | v], of all heads or group by group."""
    name = family.names.fused
    assert name is not None
    n_blocks = sizes.n_kv_heads if family.fused_by == "group" else 1
    rows_per_block = (sizes.n_heads + 2 * sizes.n_kv_heads) // n_blocks * sizes.head_dim
    heads: list[Heads] = []
    for parameter in ("weight", "bias"):
        first_row = 0
        for kind, _, n in _kinds(family, sizes):
            heads.append(
                Heads(kind, (f"{name}.{parameter}",), first_row, sizes.head_dim, n, n // n_blocks, rows_per_block)
            )
            first_row += n // n_blocks * sizes.head_dim
    return {name: n_blocks * rows_per_block}, heads


def _norm_shapes(name: str, norms: HeadNorms, n_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    if norms.layout == "none":
        return {}
    if norms.layout == "shared":
        return {f"{name}.{parameter}": (head_dim,) for parameter in ("weight", "bias")}
    if norms.layout == "list":
        return {f"{name}.norms.{head}.weight": (head_dim,) for head in range(n_heads)}
    return {f"{name}.weight": (n_heads, head_dim) if norms.layout == "matrix" else (n_heads * head_dim,)}


def attention_tensors(family: Family, tensors: Mapping[str, TensorInfo]) -> dict[int, dict[str, TensorInfo]]:
    """Return the attention tensors of each layer, by part.

    Raises CheckpointError for a tensor that looks like attention but does not fit the family.
    """
    names = family.names
    modules = "|".join(map(re.escape, names.attention))
    layer = rf"(?:{names.prefix}){names.layers}\.(?P<layer>0|[1-9][0-9]{{0,5}})"
    pattern = re.compile(rf"{layer}\.(?P<part>(?:{modules})\..+)")
    possible = _possible_parts(family)
    layers: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if names.other_towers is not None and re.match(names.other_towers, name):
            continue
        match = pattern.fullmatch(name)
        if match and possible.fullmatch(match["part"]):
            parts = layers[int(match["layer"])]
            if match["part"] in parts:
                raise CheckpointError(
                    f"the tensors {parts[match['part']].name} and {name} claim the same place; remove one."
                )
            parts[match["part"]] = tensor
        elif match or LOOKS_LIKE_ATTENTION.search(name):
            if wrapper := TRAINING_PREFIXES.match(name):
                raise CheckpointError(
                    f"the name of the tensor {name} begins with {wrapper[0]!r}, which a wrapper of the model added "
                    "(DDP, FSDP, DeepSpeed, torch.compile or PEFT); save the model without the wrapper."
                )
            raise CheckpointError(
                f"the tensor {name} (shape {tensor.shape}) is attention in a layout, or under a name, that "
                f"model_type {family.model_type!r} does not have; refused."
            )
    return layers


def _possible_parts(family: Family) -> re.Pattern[str]:
    """Return the pattern of all parts that a family can have, for any sizes."""
    layout = make_layer_layout(family, Sizes(n_heads=1, n_kv_heads=1, head_dim=1, hidden_size=1))
    parts = {re.escape(part) for part in (*layout.shapes, *_copied(family))}
    return re.compile("|".join(part.replace(r"norms\.0\.", r"norms\.(?:0|[1-9][0-9]{0,5})\.") for part in parts))


def _copied(family: Family) -> set[str]:
    """Return the parts that do not depend on the number of heads."""
    return {f"{module}.{part}" for module in family.names.attention for part in family.names.headless_parts}


@dataclass(frozen=True)
class ModelLayout:
    """The heads of all layers of a checkpoint, and their rows for any number of K/V heads."""

    family: Family
    sizes: Sizes
    entries: tuple[tuple[str, int], ...]
    """Per layer and entry of `LayerLayout.heads` that it has: prefix of the tensor names, and index of the entry."""

    @cached_property
    def layer_prefixes(self) -> tuple[str, ...]:
        """The beginnings of the layers' tensor names, in order."""
        return tuple(dict.fromkeys(prefix for prefix, _ in self.entries))

    def heads(self, n_kv_heads: int) -> tuple[Heads, ...]:
        """Return all heads under full tensor names, in the same order for every number of K/V heads."""
        layout = make_layer_layout(self.family, replace(self.sizes, n_kv_heads=n_kv_heads))
        return tuple(_prefixed(prefix, layout.heads[i]) for prefix, i in self.entries)


def find_attention(family: Family, sizes: Sizes, layers: Layers) -> ModelLayout:
    """Return the position of the heads of all layers. Raises CheckpointError if a layer is incomplete."""
    layout = make_layer_layout(family, sizes)
    present = {part for parts in layers.values() for part in parts if part not in _copied(family)}
    names = family.names
    for layer, parts in layers.items():
        for module in names.attention:
            if (f"{module}.{names.key}.bias" in parts) != (f"{module}.{names.value}.bias" in parts):
                raise CheckpointError(f"layer {layer} has a bias on one of K and V only; the checkpoint is incomplete.")
    entries = []
    for layer, parts in sorted(layers.items()):
        _check_layer(layer, layout, parts, present)
        prefix = _layer_prefix(parts)
        entries += [(prefix, i) for i, heads in enumerate(layout.heads) if heads.tensor_names[0] in parts]
    return ModelLayout(family, sizes, tuple(entries))


def _layer_prefix(parts: Mapping[str, TensorInfo]) -> str:
    """Return the prefix that all tensor names of a layer share."""
    prefixes = {tensor.name.removesuffix(part): tensor.name for part, tensor in parts.items()}
    if len(prefixes) > 1:
        first, second, *_ = prefixes.values()
        raise CheckpointError(f"{first} and {second} belong to one layer, but not by their names; rename one.")
    return next(iter(prefixes))


def _check_layer(layer: int, layout: LayerLayout, parts: Mapping[str, TensorInfo], present: set[str]) -> None:
    for part in sorted(layout.required):
        if part not in parts:
            raise CheckpointError(f"layer {layer} has no {part}; the checkpoint is incomplete.")
    for part, tensor in parts.items():
        if part in layout.shapes:
            _check_tensor(tensor, layout.shapes[part])
        elif part in present:
            raise CheckpointError(
                f"{tensor.name} belongs to a head that config.json and the other tensors do not have; remove the "
                "tensor, or correct the number of heads."
            )
    for heads in layout.heads:
        if present.intersection(heads.tensor_names):
            _check_heads(layer, heads, parts)


def _check_heads(layer: int, heads: Heads, parts: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError unless a layer has all of these heads in one dtype."""
    for part in heads.tensor_names:
        if part not in parts:
            raise CheckpointError(f"layer {layer} has no {part}, as others have; the checkpoint is incomplete.")
    if len({parts[part].dtype for part in heads.tensor_names}) > 1:
        raise CheckpointError(
            f"layer {layer} has {heads.tensor_names[0]} and its neighbours in different dtypes, which cannot be merged."
        )


def _check_tensor(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.name} has shape {tensor.shape}, but config.json and the other layers imply {shape}; "
            "they do not match."
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{tensor.name} is {tensor.dtype}: quantised or packed weights cannot be merged; "
            f"start from the original model in {', '.join(FLOAT_DTYPES)}."
        )
