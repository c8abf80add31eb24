"""Where attention lies among a checkpoint's tensors: the shape of every part, and which rows are K/V heads."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from model.checkpoint import FLOAT_DTYPES, Tensor
from model.errors import CheckpointError
from model.families import Family

# Buffers that old checkpoints hold.
BUFFERS = ("rotary_emb.inv_freq",)
LOOKS_LIKE_ATTENTION = re.compile(r"attn\.|attention\.|[._](k|v|kv|qkv)_proj\.")
Layers = Mapping[int, Mapping[str, Tensor]]
"""Layer → part, the rest of the name after `self_attn.` → tensor."""


@dataclass(frozen=True)
class Sizes:
    """What the shapes of attention depend on."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int


@dataclass(frozen=True)
class KVHeads:
    """All K heads, or all V heads, of one layer in its weights, biases or norms, one head after another."""

    kind: Literal["k", "v"]
    tensors: tuple[str, ...]
    """The tensor whose rows they are, or one tensor for each head."""
    first_row: int
    """How many rows stand before the first head: those of the queries, where the projection is fused."""
    rows_per_head: int


@dataclass(frozen=True)
class Layout:
    """A family's attention at given sizes. Names are parts."""

    shapes: Mapping[str, tuple[int, ...]]
    required: frozenset[str]
    kv_heads: tuple[KVHeads, ...]


def make_layout(family: Family, sizes: Sizes) -> Layout:
    """Return the shapes of a family's attention, all optional parts included."""
    rows = sizes.n_heads * sizes.head_dim
    shapes = {f"{family.output}.weight": (sizes.hidden_size, rows), f"{family.output}.bias": (sizes.hidden_size,)}
    n_rows, kv_heads = _fused(family.fused, sizes) if family.fused is not None else _separate(family, sizes)
    for name, n in n_rows.items():
        shapes |= {f"{name}.weight": (n, sizes.hidden_size), f"{name}.bias": (n,)}
    required = frozenset(part for part in shapes if part.endswith(".weight"))
    if family.head_norms is not None:
        norms = family.head_norms
        shapes |= _norm_shapes(norms.query, norms.layout, sizes.n_heads, sizes.head_dim)
        of_keys = _norm_shapes(norms.key, norms.layout, sizes.n_kv_heads, sizes.head_dim)
        shapes |= of_keys
        kv_heads.append(KVHeads("k", tuple(of_keys), 0, 1 if norms.layout == "matrix" else sizes.head_dim))
    return Layout(shapes, required, tuple(kv_heads))


def _separate(family: Family, sizes: Sizes) -> tuple[dict[str, int], list[KVHeads]]:
    """Return each projection's number of rows, and the K/V heads in weights and biases."""
    n_q, n_kv = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
    kv_heads = [KVHeads("k", (f"{family.key}.{kind}",), 0, sizes.head_dim) for kind in ("weight", "bias")]
    kv_heads += [KVHeads("v", (f"{family.value}.{kind}",), 0, sizes.head_dim) for kind in ("weight", "bias")]
    return {family.query: n_q, family.key: n_kv, family.value: n_kv}, kv_heads


def _fused(name: str, sizes: Sizes) -> tuple[dict[str, int], list[KVHeads]]:
    """Return the same for one projection whose rows are [q | k | v]."""
    n_q, n_kv = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
    kv_heads = []
    for kind in ("weight", "bias"):
        kv_heads.append(KVHeads("k", (f"{name}.{kind}",), n_q, sizes.head_dim))
        kv_heads.append(KVHeads("v", (f"{name}.{kind}",), n_q + n_kv, sizes.head_dim))
    return {name: n_q + 2 * n_kv}, kv_heads


def _norm_shapes(name: str, layout: str, n_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    if layout == "list":
        return {f"{name}.norms.{head}.weight": (head_dim,) for head in range(n_heads)}
    return {f"{name}.weight": (n_heads, head_dim) if layout == "matrix" else (n_heads * head_dim,)}


def attention_tensors(
    family: Family, others: str | None, tensors: Mapping[str, Tensor]
) -> dict[int, dict[str, Tensor]]:
    """Find the attention of each layer. Any tensor that looks like attention but does not fit is refused.

    `others` is the pattern of names that belong to another model in the same checkpoint (`families.Wrapper`).
    """
    pattern = re.compile(rf"(?:{family.prefix})layers\.(?P<layer>0|[1-9][0-9]{{0,5}})\.self_attn\.(?P<part>.+)")
    known = _known_parts(family)
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if others is not None and re.match(others, name):
            continue
        match = pattern.fullmatch(name)
        if match and known.fullmatch(match["part"]):
            parts = layers[int(match["layer"])]
            if match["part"] in parts:
                raise CheckpointError(
                    f"the tensors {parts[match['part']].name} and {name} claim the same place; remove one."
                )
            parts[match["part"]] = tensor
        elif match or LOOKS_LIKE_ATTENTION.search(name):
            raise CheckpointError(
                f"the tensor {name} (shape {tensor.shape}) is attention in a layout that "
                f"model_type {family.model_type!r} does not have; refused rather than guessed."
            )
    return layers


def _known_parts(family: Family) -> re.Pattern[str]:
    """Return the pattern of all parts a family may have, whatever its sizes."""
    layout = make_layout(family, Sizes(n_heads=1, n_kv_heads=1, head_dim=1, hidden_size=1))
    parts = {re.escape(part) for part in (*layout.shapes, *family.not_per_head, *BUFFERS)}
    return re.compile("|".join(part.replace(r"norms\.0\.", r"norms\.(?:0|[1-9][0-9]{0,5})\.") for part in parts))


def find_kv_heads(family: Family, sizes: Sizes, layers: Layers) -> tuple[KVHeads, ...]:
    """Return the K/V heads of all layers, by tensor names. Raises CheckpointError where a layer lacks something."""
    layout = make_layout(family, sizes)
    copied = {*family.not_per_head, *BUFFERS}
    present = {part for parts in layers.values() for part in parts if part not in copied}
    for layer, parts in layers.items():
        if family.fused is None and (f"{family.key}.bias" in parts) != (f"{family.value}.bias" in parts):
            raise CheckpointError(f"layer {layer} has a bias on one of K and V only; the checkpoint is incomplete.")
    found = []
    for layer, parts in sorted(layers.items()):
        _check_layer(layer, layout, parts, present)
        found += list(_named(layout, parts))
    return tuple(found)


def _named(layout: Layout, parts: Mapping[str, Tensor]) -> Iterator[KVHeads]:
    for heads in layout.kv_heads:
        if heads.tensors[0] in parts:
            yield replace(heads, tensors=tuple(parts[part].name for part in heads.tensors))


def _check_layer(layer: int, layout: Layout, parts: Mapping[str, Tensor], present: set[str]) -> None:
    for part in sorted(layout.required):
        if part not in parts:
            raise CheckpointError(f"layer {layer} has no {part}; the checkpoint is incomplete.")
    for part, tensor in parts.items():
        if part in layout.shapes:
            _check_tensor(tensor, layout.shapes[part])
        elif part in present:
            raise CheckpointError(
                f"{tensor.name} belongs to a head that config.json and the other tensors do not have."
            )
    for heads in layout.kv_heads:
        if present.intersection(heads.tensors):
            _check_heads(layer, heads, parts)


def _check_heads(layer: int, heads: KVHeads, parts: Mapping[str, Tensor]) -> None:
    """Check that a layer has these heads, all in one dtype."""
    for part in heads.tensors:
        if part not in parts:
            raise CheckpointError(f"layer {layer} has no {part}, as others have; the checkpoint is incomplete.")
    if len({parts[part].dtype for part in heads.tensors}) > 1:
        raise CheckpointError(
            f"layer {layer} has {heads.tensors[0]} and its neighbours in different dtypes, which cannot be merged."
        )


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
