"""Map the tensors with K/V heads to the output's tensors: the rows to merge and the rows to copy."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from convert.errors import UnsupportedMethodError
from convert.layer_tensors.converted_layer import LayerConversion
from convert.merging.heads import HeadMerge
from convert.merging.layer_merge import LayerMerge
from convert.merging.merge_recipe import MergeRecipe
from model.attention_layout import Heads, projections
from model.checkpoint import TensorInfo
from model.families.family import Family
from model.geometry import Geometry


@dataclass(frozen=True)
class Rows:
    """Rows of an output tensor that are copied from the source."""

    row: int
    """The first row in the output tensor."""
    source: str
    source_row: int
    n: int


@dataclass(frozen=True)
class Scaled:
    """A tensor of the source, to be multiplied by a number and rounded to the output's dtype."""

    source: str
    factor: float


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the output that differs from the source's. Rows are copied or merged, or all are computed."""

    tensor: TensorInfo
    copies: tuple[Rows, ...] = ()
    merges: tuple[HeadMerge, ...] = ()
    layer: LayerConversion | None = None
    """The conversion of a whole layer that makes the tensor. Then `copies` and `merges` are empty."""
    scaled: Scaled | None = None
    """The tensor that this one is a multiple of. Then `copies` and `merges` are empty."""

    @property
    def reported_heads(self) -> tuple[Heads, ...]:
        """The merged heads in this tensor that have a report."""
        if self.layer is None:
            return tuple(merge.merged for merge in self.merges)
        return tuple(heads for heads in self.layer.reported_heads if heads.tensor_names[0] == self.tensor.name)


def regroup(geometry: Geometry, tensors: Mapping[str, TensorInfo], n_kv_heads: int) -> dict[str, OutputTensor]:
    """Return the output tensors that change with the number of heads, by name. `tensors`: the source's tensors.

    With fewer heads than before, each group of neighbours is merged. With more, each head is repeated.
    """
    before, after = (geometry.attention.heads(n) for n in (geometry.n_kv_heads, n_kv_heads))
    pairs: dict[str, list[tuple[Heads, Heads]]] = defaultdict(list)
    for source, output in zip(before, after, strict=True):
        for name in output.tensor_names:
            pairs[name].append((source, output))
    return {name: _output_tensor(name, heads, tensors) for name, heads in pairs.items()}


def check_layer_merge(geometry: Geometry, tensors: Mapping[str, TensorInfo], method: str) -> None:
    """Raise UnsupportedMethodError, without advice, if one of LAYER_METHODS cannot merge this model's heads."""
    family = geometry.family
    if geometry.n_rotary_pairs is None and family.positions.rotary_fraction is not None:
        raise UnsupportedMethodError(
            f"--method {method} rotates pairs of dimensions, but this model's rotary embedding has an odd number of "
            f"them in a head of {geometry.head_dim}."
        )
    if geometry.n_rotary_pairs is None:
        without = "" if family.positions.alibi is None else f" without {family.positions.alibi} = true"
        raise UnsupportedMethodError(
            f"--method {method} maps heads before it merges them, which is not implemented for the attention of "
            f"model_type {family.model_type!r}{without}."
        )
    for prefix in _prefixes(geometry):
        biases = {heads.tensor_names[0] for heads in projections(family, geometry.attention.sizes, "bias", prefix)}
        if len(biases & tensors.keys()) not in (0, len(biases)):
            raise UnsupportedMethodError(f"{prefix[:-1]} has a bias on some of q, k and v only.")
        _check_norms(family, prefix, tensors, method)


def _check_norms(family: Family, prefix: str, tensors: Mapping[str, TensorInfo], method: str) -> None:
    """Raise UnsupportedMethodError unless a layer method can merge the norms below `prefix`, if there are any."""
    norms = family.head_norms
    if norms is None or norms.layout == "none":
        return
    names = {f"{prefix}{norms.query}.weight", f"{prefix}{norms.key}.weight"}
    if norms.kind == "rms" and not names <= tensors.keys():
        missing = min(names - tensors.keys())
        raise UnsupportedMethodError(f"the tensor {missing} is missing, which --method {method} needs.")
    present = [name for name in tensors if name.startswith((f"{prefix}{norms.query}.", f"{prefix}{norms.key}."))]
    if norms.kind == "layer" and present:
        raise UnsupportedMethodError(
            f"--method {method} maps heads before it merges them, but {present[0]} normalises queries or keys "
            "afterwards, and subtracts their mean."
        )


def _prefixes(geometry: Geometry) -> list[str]:
    """Return the beginnings of the attention modules' tensor names, in the order of layers."""
    attention = geometry.attention
    return [f"{prefix}{module}." for prefix in attention.layer_prefixes for module in attention.family.names.attention]


def layer_merges(
    geometry: Geometry, tensors: Mapping[str, TensorInfo], n_kv_heads: int, recipe: MergeRecipe
) -> tuple[LayerMerge, ...]:
    """Return the merges of whole layers, in order, by one of LAYER_METHODS. `tensors`: the source's tensors.

    Raises UnsupportedMethodError if the method cannot merge this family's heads.
    """
    check_layer_merge(geometry, tensors, recipe.method)
    assert geometry.n_rotary_pairs is not None
    family, sizes = geometry.family, geometry.attention.sizes
    norms = family.head_norms if family.head_norms and family.head_norms.kind == "rms" else None
    merges = []
    per_layer = len(family.names.attention)
    for i, prefix in enumerate(_prefixes(geometry)):
        source_heads, output_heads = (
            tuple(
                heads
                for parameter in ("weight", "bias")
                for heads in projections(family, replace(sizes, n_kv_heads=n), parameter, prefix)
                if heads.tensor_names[0] in tensors
            )
            for n in (sizes.n_kv_heads, n_kv_heads)
        )
        merge = LayerMerge(
            recipe=recipe,
            n_rotary_pairs=geometry.n_rotary_pairs[i // per_layer],
            pairing=family.positions.rotary_pairing,
            sizes=sizes,
            n_kv_heads=n_kv_heads,
            source_heads=source_heads,
            output_heads=output_heads,
            output_weight=f"{prefix}{family.names.output}.weight",
            norms=norms,
        )
        merges.append(merge)
    return tuple(merges)


def tensors_of_merges(merges: Sequence[LayerMerge], tensors: Mapping[str, TensorInfo]) -> dict[str, OutputTensor]:
    """Return the output tensors of merged layers, by name. `tensors`: the source's tensors."""
    computed: dict[str, OutputTensor] = {}
    for merge in merges:
        for name in merge.tensor_names:
            tensor = tensors[name]
            shape = (merge.n_rows(name) or tensor.shape[0], *tensor.shape[1:])
            computed[name] = OutputTensor(replace(tensor, shape=shape), layer=merge)
    return computed


def _output_tensor(name: str, pairs: list[tuple[Heads, Heads]], tensors: Mapping[str, TensorInfo]) -> OutputTensor:
    copies: list[Rows] = []
    merges: list[HeadMerge] = []
    n_rows = 0
    for source, output in pairs:
        heads = tuple(head for head in range(output.n) if output.tensor_and_row(head)[0] == name)
        n_rows += len(heads) * output.rows_per_head
        if output.n < source.n:
            merges.append(HeadMerge(name, source, output, heads))
        else:
            for head in heads:
                source_name, source_row = source.tensor_and_row(head // (output.n // source.n))
                copies.append(Rows(output.tensor_and_row(head)[1], source_name, source_row, output.rows_per_head))
    like = tensors[pairs[0][0].tensor_names[0]]
    tensor = replace(like, name=name, shape=(n_rows, *like.shape[1:]))
    return OutputTensor(tensor, tuple(_coalesced(copies)), tuple(merges))


def _coalesced(copies: list[Rows]) -> list[Rows]:
    """Coalesce adjacent row ranges, so that the queries of a fused projection are few pieces."""
    coalesced: list[Rows] = []
    for rows in copies:
        last = coalesced[-1] if coalesced else None
        follows = last and (last.row + last.n, last.source, last.source_row + last.n)
        if last and follows == (rows.row, rows.source, rows.source_row):
            coalesced[-1] = replace(last, n=last.n + rows.n)
        else:
            coalesced.append(rows)
    return coalesced
