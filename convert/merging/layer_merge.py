"""Merge the K/V heads of a whole layer, and adapt its queries and output projection."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convert.layer_tensors.converted_layer import ConvertedLayer, GroupReport
from convert.layer_tensors.head_matrices import (
    HeadMatrices,
    NormWeights,
    Real,
    half_split_order,
    join_heads,
    split_heads,
)
from convert.layer_tensors.rounding import read_finite, rounded
from convert.merging.heads import report_on_group
from convert.merging.merge_recipe import MergeRecipe
from convert.merging.methods import find_layer_method
from convert.merging.moments import Maps, Moments, keep_logit_variance, map_heads, moments_from_weights
from convert.merging.norms import normalise, with_norms
from model.attention_layout import Heads, Sizes
from model.checkpoint import Checkpoint
from model.families.family import HeadNorms


@dataclass(frozen=True)
class LayerMerge:
    """A request to merge one layer's attention, with the names of its tensors."""

    recipe: MergeRecipe
    n_rotary_pairs: int
    pairing: Literal["half", "interleaved"]
    """See `PositionEncoding.rotary_pairing`."""
    sizes: Sizes
    n_kv_heads: int
    source_heads: tuple[Heads, ...]
    """The query, key and value heads in the source's weights, and again in its biases if it has any."""
    output_heads: tuple[Heads, ...]
    """The same in the output."""
    output_weight: str
    """The weight of the output projection. Its bias never changes."""
    norms: HeadNorms | None = None
    """The RMS norms of queries and keys, if there are any."""

    @property
    def weights(self) -> tuple[str, ...]:
        """The tensors of the weights, each once: three projections, or a fused one, and the output projection."""
        return (*dict.fromkeys(heads.tensor_names[0] for heads in self.source_heads[:3]), self.output_weight)

    @property
    def biases(self) -> tuple[str, ...]:
        """The tensors of the biases, each once."""
        return tuple(dict.fromkeys(heads.tensor_names[0] for heads in self.source_heads[3:]))

    @property
    def norm_tensors(self) -> tuple[str, ...]:
        """The weights of the norms of queries and of keys; none if the norms have no weights."""
        if self.norms is None or self.norms.layout == "none":
            return ()
        module = self.output_weight.removesuffix(".weight").rpartition(".")[0]
        return f"{module}.{self.norms.query}.weight", f"{module}.{self.norms.key}.weight"

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """All tensors of the merged layer."""
        return (*self.weights, *self.biases, *self.norm_tensors)

    def n_rows(self, name: str) -> int:
        """Return the number of rows of one of the output's tensors; 0 if it does not depend on the number of heads."""
        if self.norms is not None and name in self.norm_tensors[1:] and not self.norms.per_head:
            return self.n_kv_heads * self.sizes.head_dim
        return sum(heads.n * heads.rows_per_head for heads in self.output_heads if heads.tensor_names[0] == name)

    @property
    def file(self) -> str:
        """The name of the layer's file in the calibration folder."""
        return f"{self.weights[0].removesuffix('.weight')}.npz"

    @property
    def reported_heads(self) -> tuple[Heads, Heads]:
        """The key and the value heads, which have a report."""
        return self.output_heads[1], self.output_heads[2]

    @property
    def half_split_order(self) -> NDArray[np.intp] | None:
        """The dimensions of a query or key head in the order of HeadMatrices; None if they are in it."""
        if self.pairing == "half":
            return None
        return half_split_order(self.sizes.head_dim, self.n_rotary_pairs, self.pairing)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's attention in float64."""
        rows = 2 * (self.sizes.n_heads + self.sizes.n_kv_heads) * self.sizes.head_dim
        return 8 * rows * self.sizes.hidden_size

    def compute(self, checkpoint: Checkpoint) -> "ConvertedLayer":
        """Merge the layer by its weights alone.

        Raises CheckpointError for NaN or infinity, before or after rounding.
        """
        projected = read_attention(checkpoint, self)
        before = normalise(projected, self.norms)
        moments = [moments_from_weights(group, before.norms is not None) for group in before.groups(self.n_kv_heads)]
        return finish_layer(checkpoint, self, projected, merge_attention(before, moments, self.recipe.method))


def merge_attention(attention: HeadMatrices, moments: list[Moments], method: str) -> HeadMatrices:
    """Return the attention with one K/V head per group. `moments` has one entry for each group."""
    merge_group = find_layer_method(method)
    return merge_with_maps(attention, moments, [merge_group(group_moments) for group_moments in moments])


def merge_with_maps(attention: HeadMatrices, moments: list[Moments], maps: list[Maps]) -> HeadMatrices:
    """Return the attention with each group's heads mapped. Each query head keeps the variance of its logits."""
    maps = [keep_logit_variance(*pair) for pair in zip(moments, maps, strict=True)]
    merged = map_heads(attention, maps)
    return merged if attention.norms is None else with_norms(merged, attention.norms, moments, maps)


def read_attention(checkpoint: Checkpoint, merge: LayerMerge) -> HeadMatrices:
    """Read a layer's attention. A bias becomes a column beside its weight, for a constant input of 1."""
    tensors = {name: read_finite(checkpoint, name) for name in merge.tensor_names}
    return _attention(tensors, merge, merge.source_heads)


def finish_layer(
    checkpoint: Checkpoint, merge: LayerMerge, before: HeadMatrices, after: HeadMatrices
) -> ConvertedLayer:
    """Return a merged layer's tensors in the checkpoint's dtypes, and the reports on its heads."""
    exact = _tensors(after, merge)
    dtypes = {name: checkpoint.rows(name, 0, 1).dtype for name in exact}
    tensors = {name: rounded(name, values, dtypes[name]) for name, values in exact.items()}
    keys, values = merge.reported_heads
    reports = {
        keys.label: _reports(keys.label, before.k_KDX, after.k_KDX),
        values.label: _reports(values.label, before.v_KDX, after.v_KDX),
    }
    return ConvertedLayer(tensors, reports)


def output_attention(tensors: dict[str, Real], merge: LayerMerge) -> HeadMatrices:
    """Return the attention of the output with these tensors, by name."""
    return _attention(tensors, merge, merge.output_heads)


def _attention(tensors: dict[str, Real], merge: LayerMerge, heads: tuple[Heads, ...]) -> HeadMatrices:
    """Return the attention with these tensors, whose heads are `merge.source_heads` or `merge.output_heads`."""
    sizes, order = merge.sizes, merge.half_split_order
    rows = [_rows(tensors, each) for each in heads[:3]]
    if len(heads) > 3:
        rows = [np.column_stack([row, _rows(tensors, bias)]) for row, bias in zip(rows, heads[3:], strict=True)]
    q_HDX, k_KDX, v_KDX = (weight.reshape(-1, sizes.head_dim, weight.shape[1]) for weight in rows)
    if order is not None:
        q_HDX, k_KDX = q_HDX[:, order], k_KDX[:, order]
    o_HMD = split_heads(tensors[merge.output_weight], sizes.n_heads)
    norms = _norms(tensors, merge, q_HDX, k_KDX)
    if norms is not None:
        assert merge.norms is not None
        if merge.norms.after_rotation and heads == merge.source_heads:
            # Then the source's heads after the norms are rotated projections, but for one number a head.
            norms = norms.with_pair_means(merge.n_rotary_pairs)
        q_HDX, k_KDX = q_HDX * norms.q_HD[:, :, None], k_KDX * norms.k_KD[:, :, None]
    return HeadMatrices(q_HDX, k_KDX, v_KDX, o_HMD, merge.n_rotary_pairs, norms)


def _norms(tensors: dict[str, Real], merge: LayerMerge, q_HDX: Real, k_KDX: Real) -> NormWeights | None:
    if not merge.norm_tensors:
        return None
    assert merge.norms is not None
    q_HD, k_KD = (_ordered(tensors[name], merge) for name in merge.norm_tensors)
    q_length, k_length = (float(np.sqrt(np.square(heads_HDX).sum(axis=2).mean())) for heads_HDX in (q_HDX, k_KDX))
    return NormWeights(q_HD, k_KD, q_length, k_length, merge.norms.per_head)


def _ordered(norm: Real, merge: LayerMerge) -> Real:
    """Return a norm's weights in the order of HeadMatrices, [H, D] or [1, D]."""
    assert merge.norms is not None
    weights_HD = norm.reshape(-1, merge.sizes.head_dim) + merge.norms.offset
    return weights_HD if merge.half_split_order is None else weights_HD[:, merge.half_split_order]


def _rows(tensors: dict[str, Real], heads: Heads) -> Real:
    """Return the rows of heads in their tensor, which is not copied if they fill it."""
    tensor, rows = tensors[heads.tensor_names[0]], heads.rows
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _tensors(attention: HeadMatrices, merge: LayerMerge) -> dict[str, Real]:
    """Return the output's tensors of a merged layer, by name."""
    hidden_size, order = merge.sizes.hidden_size, merge.half_split_order
    tensors: dict[str, Real] = {}
    q_HDX, k_KDX = attention.projections
    if attention.norms is not None:
        assert merge.norms is not None
        for name, norm_HD in zip(merge.norm_tensors, (attention.norms.q_HD, attention.norms.k_KD), strict=True):
            norm = norm_HD if order is None else norm_HD[:, np.argsort(order)]
            tensors[name] = norm.flatten() - merge.norms.offset
    for i, heads_DX in enumerate((q_HDX, k_KDX, attention.v_KDX)):
        heads = heads_DX if order is None or i == 2 else heads_DX[:, np.argsort(order)]
        rows = heads.reshape(-1, heads.shape[2])
        _put_rows(tensors, merge.output_heads, i, rows[:, :hidden_size])
        if merge.biases:
            _put_rows(tensors, merge.output_heads, 3 + i, rows[:, hidden_size])
    tensors[merge.output_weight] = join_heads(attention.o_HMD)
    return tensors


def _put_rows(tensors: dict[str, Real], target: tuple[Heads, ...], i: int, rows: Real) -> None:
    """Put the rows of heads `target[i]` into their tensor, which other heads may share."""
    name = target[i].tensor_names[0]
    sharing = [heads for heads in target if heads.tensor_names[0] == name]
    if len(sharing) == 1:
        tensors[name] = rows
        return
    if name not in tensors:
        tensors[name] = np.empty((sum(heads.n * heads.rows_per_head for heads in sharing), *rows.shape[1:]))
    tensors[name][target[i].rows] = rows


def _reports(name: str, before_KDX: Real, after_GDX: Real) -> list[GroupReport]:
    groups = np.split(before_KDX, len(after_GDX))
    return [report_on_group(heads, merged, name) for heads, merged in zip(groups, after_GDX, strict=True)]
