"""Merge the heads of a whole layer: K/V heads become fewer, and queries and output projection change with them."""

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.merging.grouping import reorder, similar_order
from convert.merging.heads import GroupReport, compare_heads
from convert.merging.methods import find_group_method
from convert.merging.moments import Maps, Moments, apply, moments_from_weights
from convert.merging.rescale import renorm
from convert.merging.rounding import round_once, widen
from convert.merging.weights import LayerAttention, Real, join
from convert.planning.recipe import Recipe
from model.attention_layout import Sizes
from model.checkpoint import Array, Checkpoint
from model.common.errors import CheckpointError
from model.common.files import sync_file


@dataclass(frozen=True)
class LayerMerge:
    """One layer's attention, by the names of its tensors."""

    recipe: Recipe
    n_rotary_pairs: int
    sizes: Sizes
    n_kv_heads: int
    weights: tuple[str, str, str, str]
    """Of queries, keys, values and output."""
    biases: tuple[str, ...]
    """Of queries, keys and values, or none. The output's stays as it is."""

    @property
    def file(self) -> str:
        """A file's name for this layer."""
        return f"{self.weights[0].removesuffix('.weight')}.npz"

    @property
    def kv_tensors(self) -> tuple[tuple[str, str], ...]:
        """The tensors on whose heads there is a report, and the kind of the heads."""
        return (self.weights[1], "k"), (self.weights[2], "v")

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's attention in float64."""
        rows = 2 * (self.sizes.n_heads + self.sizes.n_kv_heads) * self.sizes.head_dim
        return 8 * rows * self.sizes.hidden_size


@dataclass(frozen=True)
class MergedLayer:
    """The layer's tensors by name, in their own dtypes, and reports on the K and V heads of each group."""

    tensors: dict[str, Array]
    reports: dict[str, list[GroupReport]]


def merge_layer(checkpoint: Checkpoint, merge: LayerMerge) -> MergedLayer:
    """Compute a layer from its weights alone. Raises CheckpointError at a NaN or infinity, here or after rounding."""
    before = read_attention(checkpoint, merge)
    if merge.recipe.grouping == "similar":
        before = reorder(before, similar_order(moments_from_weights(before), merge.n_kv_heads))
    moments = [moments_from_weights(group) for group in before.groups(merge.n_kv_heads)]
    return finish_layer(checkpoint, merge, before, merge_attention(before, moments, merge.recipe))


def merge_attention(attention: LayerAttention, moments: list[Moments], recipe: Recipe) -> LayerAttention:
    """Return the attention with one K/V head for each group whose moments are given."""
    merge_group = find_group_method(recipe.method)
    return apply_maps(attention, moments, [merge_group(known) for known in moments], recipe)


def apply_maps(attention: LayerAttention, moments: list[Moments], maps: list[Maps], recipe: Recipe) -> LayerAttention:
    """Return the attention with each group's heads mapped, at the scale that the recipe wants."""
    groups = zip(attention.groups(len(moments)), moments, maps, strict=True)
    return join([apply(group, renorm(known, found, recipe.renorm)) for group, known, found in groups])


def read_attention(checkpoint: Checkpoint, merge: LayerMerge) -> LayerAttention:
    """Read a layer. Biases stand beside their weights, as the column that reads a constant 1."""
    return attention_of({name: _read(checkpoint, name) for name in (*merge.weights, *merge.biases)}, merge)


def finish_layer(
    checkpoint: Checkpoint, merge: LayerMerge, before: LayerAttention, after: LayerAttention
) -> MergedLayer:  # fmt: skip
    """Return a layer's tensors as they are written, and what became of its heads."""
    found = _tensors(after, merge)
    dtypes = {name: checkpoint.rows(name, 0, 1).dtype for name in found}
    tensors = {name: _rounded(name, values, dtypes[name]) for name, values in found.items()}
    reports = {
        name: _reports(name, *heads)
        for (name, _), heads in zip(
            merge.kv_tensors, ((before.k_KDX, after.k_KDX), (before.v_KDX, after.v_KDX)), strict=True
        )
    }
    return MergedLayer(tensors, reports)


class MergedLayerCache:
    """Merged layers for several workers: each is computed once while its tensors are written one after another.

    With a folder they are not computed but read, as `convert.calibration.solve` has left them there.
    """

    def __init__(self, checkpoint: Checkpoint, n_workers: int, calibrated: Path | None = None) -> None:
        self._checkpoint, self._size, self._calibrated = checkpoint, n_workers, calibrated
        self._lock = threading.Lock()
        self._kept: OrderedDict[LayerMerge, Future[MergedLayer]] = OrderedDict()

    def get(self, merge: LayerMerge) -> MergedLayer:
        """Return a layer, computed here or by the worker that asked for it first. Keeps one for each worker."""
        with self._lock:
            future, mine = self._kept.get(merge), merge not in self._kept
            if future is None:
                future = self._kept[merge] = Future()
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        if mine:
            try:
                future.set_result(self._make(merge))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _make(self, merge: LayerMerge) -> MergedLayer:
        if self._calibrated is None:
            return merge_layer(self._checkpoint, merge)
        return load_layer(self._checkpoint, merge, self._calibrated)


def save_layer(layer: MergedLayer, merge: LayerMerge, folder: Path) -> None:
    """Keep a layer in a folder; it appears whole or not at all."""
    partial = folder / f"{merge.file}.partial"
    with partial.open("wb") as file:
        reports = json.dumps({name: [asdict(r) for r in found] for name, found in layer.reports.items()})
        arrays: dict[str, Any] = {name: values.reshape(-1).view(np.uint8) for name, values in layer.tensors.items()}
        np.savez(file, reports=np.array(reports), **arrays)
    sync_file(partial)
    partial.rename(folder / merge.file)


def load_layer(checkpoint: Checkpoint, merge: LayerMerge, folder: Path) -> MergedLayer:
    """Read what `save_layer` kept."""
    with np.load(folder / merge.file, allow_pickle=False) as kept:
        reports = json.loads(str(kept["reports"]))
        tensors = {}
        for name in (*merge.weights, *merge.biases):
            like = checkpoint.rows(name, 0, 1)
            tensors[name] = kept[name].view(like.dtype).reshape(-1, *like.shape[1:])
    return MergedLayer(tensors, {name: [GroupReport(**r) for r in found] for name, found in reports.items()})


def _read(checkpoint: Checkpoint, name: str) -> Real:
    tensor = checkpoint.tensors[name]
    values: Real = widen(checkpoint.rows(name, 0, tensor.shape[0])).astype(np.float64)
    if not np.isfinite(values).all():
        raise CheckpointError(f"the tensor {name} holds NaN or infinite values; the checkpoint is damaged.")
    return values


def attention_of(source: dict[str, Real], merge: LayerMerge) -> LayerAttention:
    """Return the attention that consists of these tensors."""
    sizes = merge.sizes
    rows = [source[name] for name in merge.weights[:3]]
    if merge.biases:
        rows = [np.column_stack([weight, source[name]]) for weight, name in zip(rows, merge.biases, strict=True)]
    q_HDX, k_KDX, v_KDX = (weight.reshape(-1, sizes.head_dim, weight.shape[1]) for weight in rows)
    o_HMD = source[merge.weights[3]].reshape(-1, sizes.n_heads, sizes.head_dim).transpose(1, 0, 2)
    return LayerAttention(q_HDX, k_KDX, v_KDX, o_HMD, merge.n_rotary_pairs)


def _tensors(attention: LayerAttention, merge: LayerMerge) -> dict[str, Real]:
    hidden_size = merge.sizes.hidden_size
    found: dict[str, Real] = {}
    for i, heads in enumerate((attention.q_HDX, attention.k_KDX, attention.v_KDX)):
        rows = heads.reshape(-1, heads.shape[2])
        found[merge.weights[i]] = rows[:, :hidden_size]
        if merge.biases:
            found[merge.biases[i]] = rows[:, hidden_size]
    found[merge.weights[3]] = attention.o_HMD.transpose(1, 0, 2).reshape(attention.o_HMD.shape[1], -1)
    return found


def _rounded(name: str, values: Real, dtype: np.dtype[Any]) -> Array:
    rounded = round_once(np.ascontiguousarray(values), dtype)
    if not np.isfinite(rounded.astype(np.float64)).all():
        raise CheckpointError(f"the merged {name} does not fit into its dtype {dtype}; use --method mean.")
    return rounded


def _reports(name: str, before_KDX: Real, after_GDX: Real) -> list[GroupReport]:
    size = len(before_KDX) // len(after_GDX)
    reports = []
    for group, merged in enumerate(after_GDX):
        heads = before_KDX[group * size : (group + 1) * size].reshape(size, -1)
        norms, mean_cosine = compare_heads(heads, [(name, 0)])
        ratio = float(np.linalg.norm(merged) / norms.mean()) if norms.any() else 1.0
        reports.append(GroupReport(ratio, mean_cosine))
    return reports
