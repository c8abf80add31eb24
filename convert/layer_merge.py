"""Merge the heads of a whole layer: K/V heads become fewer, and queries and output projection change with them."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.attention import LayerAttention, Real
from convert.merge import GroupReport, compare_heads
from convert.methods import find_layer_method
from convert.rounding import round_once, widen
from model.checkpoint import Array, Checkpoint
from model.errors import CheckpointError
from model.layout import Sizes


@dataclass(frozen=True)
class LayerMerge:
    """One layer's attention, by the names of its tensors."""

    method: str
    sizes: Sizes
    n_kv_heads: int
    weights: tuple[str, str, str, str]
    """Of queries, keys, values and output."""
    biases: tuple[str, ...]
    """Of queries, keys and values, or none. The output's stays as it is."""

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
    """Compute a layer. Raises CheckpointError at a NaN or infinity, in the source or after rounding."""
    source = {name: _read(checkpoint, name) for name in (*merge.weights, *merge.biases)}
    before = _attention(source, merge)
    after = find_layer_method(merge.method)(before, merge.n_kv_heads, None)
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


class Layers:
    """Merged layers for several workers: each is computed once while its tensors are written one after another."""

    def __init__(self, checkpoint: Checkpoint, n_workers: int) -> None:
        self._checkpoint, self._size = checkpoint, n_workers
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
                future.set_result(merge_layer(self._checkpoint, merge))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def _read(checkpoint: Checkpoint, name: str) -> Real:
    tensor = checkpoint.tensors[name]
    values: Real = widen(checkpoint.rows(name, 0, tensor.shape[0])).astype(np.float64)
    if not np.isfinite(values).all():
        raise CheckpointError(f"the tensor {name} holds NaN or infinite values; the checkpoint is damaged.")
    return values


def _attention(source: dict[str, Real], merge: LayerMerge) -> LayerAttention:
    """Put biases beside their weights, as the column that reads a constant 1."""
    sizes = merge.sizes
    rows = [source[name] for name in merge.weights[:3]]
    if merge.biases:
        rows = [np.column_stack([weight, source[name]]) for weight, name in zip(rows, merge.biases, strict=True)]
    q_HDX, k_KDX, v_KDX = (weight.reshape(-1, sizes.head_dim, weight.shape[1]) for weight in rows)
    o_HMD = source[merge.weights[3]].reshape(-1, sizes.n_heads, sizes.head_dim).transpose(1, 0, 2)
    return LayerAttention(q_HDX, k_KDX, v_KDX, o_HMD, sizes.head_dim // 2)


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
