"""Merge heads, one group at a time, and measure norms and cosines."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from convert.layer_tensors.converted_layer import GroupReport
from convert.merging.methods import find_head_method
from convert.recipe import Recipe
from model.attention_layout import Heads
from model.checkpoint import Array, Checkpoint, TensorInfo
from model.common.errors import CheckpointError

_BLOCK = 1 << 17  # elements measured at a time


@dataclass(frozen=True)
class HeadMerge:
    """K or V heads to merge, restricted to the merged heads in one tensor of the output."""

    tensor_name: str
    """The output's tensor."""
    source: Heads
    target: Heads
    heads: tuple[int, ...]
    """Indices of the output's heads in the tensor."""

    @property
    def merged(self) -> Heads:
        """The output's heads in the tensor."""
        return replace(self.target, tensor_names=(self.tensor_name,))

    @property
    def sources_per_head(self) -> int:
        """Number of the source's heads that are merged into one."""
        return self.source.n // self.target.n

    def tensors_and_rows(self, head: int) -> list[tuple[str, int]]:
        """Return the source heads of one output head, each as tensor and first row."""
        return [self.source.tensor_and_row(head * self.sources_per_head + i) for i in range(self.sources_per_head)]

    def group_nbytes(self, tensor: TensorInfo) -> int:
        """Return the bytes of a group's heads. `tensor`: any of the tensors that hold them, for its row size."""
        return self.sources_per_head * self.source.rows_per_head * (tensor.nbytes // tensor.shape[0])


def tensor_rng(seed: int, name: str) -> np.random.Generator:
    """Return the random generator of one tensor. It does not depend on the worker or on the order of tensors."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def merge_groups(checkpoint: Checkpoint, merge: HeadMerge, recipe: Recipe) -> Iterator[tuple[int, Array, GroupReport]]:
    """Yield for each merged head its first row in the output, its rows [rows_per_head, …] and its report.

    The rows have the tensor's dtype. One group of the source is in memory at a time. Raises CheckpointError if a head
    holds NaN or infinity.
    """
    merge_heads, rng = find_head_method(recipe.method), tensor_rng(recipe.seed, merge.merged.label)
    for head in merge.heads:
        sources = merge.tensors_and_rows(head)
        rows = _read_group(checkpoint, sources, merge.source.rows_per_head)
        heads_HDM = rows.reshape(merge.sources_per_head, -1, prod(rows.shape[1:]))
        name = " to ".join(dict.fromkeys((sources[0][0], sources[-1][0])))
        with np.errstate(invalid="ignore"):  # the report refuses NaN and infinite values
            merged_DM = merge_heads(heads_HDM, rng)
        report = report_on_group(heads_HDM, merged_DM, name)
        _, row = merge.target.tensor_and_row(head)
        yield row, merged_DM.reshape(merge.target.rows_per_head, *rows.shape[1:]), report


def _read_group(checkpoint: Checkpoint, sources: list[tuple[str, int]], n_rows: int) -> Array:
    """Read heads of `n_rows` rows each: in one read if they are neighbours, as they often are."""
    name, start = sources[0]
    if sources[-1] == (name, start + (len(sources) - 1) * n_rows):
        return checkpoint.rows(name, start, start + len(sources) * n_rows)
    return np.concatenate([checkpoint.rows(name, row, row + n_rows) for name, row in sources])


def report_on_group(heads_HDM: Array, merged_DM: Array, name: str) -> GroupReport:
    """Return the report on a group's heads and their merged head. `name` is the tensor's, for the error.

    Raises CheckpointError if a head holds NaN or infinity.
    """
    norms_H, mean_cosine = compare_heads(heads_HDM.reshape(len(heads_HDM), -1), name)
    ratio = _norms(merged_DM.reshape(1, -1))[0] / norms_H.mean() if norms_H.any() else 1.0
    return GroupReport(float(ratio), mean_cosine)


def compare_heads(heads_HF: Array, name: str) -> tuple[NDArray[np.float64], float]:
    """Return the norm of each head, [H], and their mean pairwise cosine. Raises as `report_on_group` does."""
    norms_H = _norms(heads_HF)
    if not np.isfinite(norms_H).all():
        raise CheckpointError(f"the tensor {name} holds NaN or infinite values; the checkpoint is damaged.")
    n = len(heads_HF)
    if n == 1:
        return norms_H, 1.0
    unit_H = 1 / np.where(norms_H > 0, norms_H, 1)  # a head of zeros stays zero
    square = 0.0
    for block_HF in _blocks(heads_HF):
        with np.errstate(over="ignore"):
            factors_H = unit_H.astype(block_HF.dtype)
        if not np.isfinite(factors_H).all():  # a head so short that float32 cannot hold 1 / norm
            factors_H = unit_H
        sum_F = np.einsum("hf,h->f", block_HF, factors_H)
        square += float(np.einsum("f,f->", sum_F, sum_F))
    # |Σ u|² = Σ |u|² + 2 Σ_{i<j} u_i·u_j, and there are n (n - 1) / 2 pairs.
    return norms_H, (square - np.count_nonzero(norms_H)) / (n * (n - 1))


def _norms(heads_HF: Array) -> NDArray[np.float64]:
    """Return each head's norm, [H]. A norm is NaN or infinite if and only if one of the head's elements is."""
    square_H = np.zeros(len(heads_HF))
    with np.errstate(over="ignore", invalid="ignore"):
        for block_HF in _blocks(heads_HF):
            square_H += np.einsum("hf,hf->h", block_HF, block_HF)
        if ((square_H > 1e-20) & np.isfinite(square_H)).all():
            return np.sqrt(square_H)
        # Some squares may be outside float32's range: divide by the largest element first.
        peak_H, square_H = np.zeros(len(heads_HF)), np.zeros(len(heads_HF))
        for block_HF in _blocks(heads_HF):
            peak_H = np.maximum(peak_H, np.abs(block_HF).max(axis=1))  # NaN stays NaN
        for block_HF in _blocks(heads_HF):
            part_HF = block_HF.astype(np.float64) / np.where(peak_H > 0, peak_H, 1)[:, None]
            square_H += np.einsum("hf,hf->h", part_HF, part_HF)
        return peak_H * np.sqrt(square_H)


def _blocks(heads_HF: Array) -> Iterator[Array]:
    """Yield pieces [H, width] of all heads, each a new array in float32 (float64 for float64)."""
    dtype = np.float64 if heads_HF.dtype == np.float64 else np.float32
    width = max(1, _BLOCK // len(heads_HF))
    for start in range(0, heads_HF.shape[1], width):
        yield heads_HF[:, start : start + width].astype(dtype)
