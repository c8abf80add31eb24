"""Merge one tensor's heads, a group at a time, and measure what the merge did to them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convert.methods import find_method
from model.checkpoint import Array, Checkpoint
from model.errors import CheckpointError

_BLOCK = 1 << 17  # elements looked at together


@dataclass(frozen=True)
class GroupReport:
    """How alike the heads of a group are, and how long the merged head is beside them."""

    norm_ratio: float
    """Norm of the merged head ÷ mean norm of the group's heads."""
    mean_cosine: float
    """Mean cosine between the heads of the group, over all pairs; 1 for a group of one."""


def tensor_rng(seed: int, name: str) -> np.random.Generator:
    """Return the random generator of one tensor: the same whoever merges it, and in whatever order."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def merge_groups(
    checkpoint: Checkpoint, name: str, n_kv_heads_in: int, n_kv_heads: int, method: str, seed: int
) -> Iterator[tuple[Array, GroupReport]]:
    """Yield each group's merged head, [head_dim, …] in the tensor's dtype, with its report, in order.

    Holds one group of the source at a time. Raises CheckpointError at a NaN or infinity.
    """
    merge, rng = find_method(method), tensor_rng(seed, name)
    rows = checkpoint.tensors[name].shape[0] // n_kv_heads
    for group in range(n_kv_heads):
        source = checkpoint.rows(name, group * rows, (group + 1) * rows)
        heads_HDM = source.reshape(n_kv_heads_in // n_kv_heads, -1, int(np.prod(source.shape[1:])))
        norms_H, mean_cosine = _compare_heads(heads_HDM.reshape(len(heads_HDM), -1), name)
        merged_DM = merge(heads_HDM, 1, rng)[0]
        ratio = _norms(merged_DM.reshape(1, -1))[0] / norms_H.mean() if norms_H.any() else 1.0
        yield merged_DM.reshape(-1, *source.shape[1:]), GroupReport(float(ratio), mean_cosine)


def _compare_heads(heads_HF: Array, name: str) -> tuple[NDArray[np.float64], float]:
    """Return the norm of each head and their mean pairwise cosine, refusing numbers that are not finite."""
    norms_H = _norms(heads_HF)
    if not np.isfinite(norms_H).all():
        raise CheckpointError(f"the tensor {name} holds NaN or infinite values; the checkpoint is damaged.")
    n = len(heads_HF)
    if n == 1:
        return norms_H, 1.0
    unit_H = 1 / np.where(norms_H > 0, norms_H, 1)  # a head of zeros stays zero
    square = 0.0
    for block_HF in _blocks(heads_HF):
        sum_F = np.einsum("hf,h->f", block_HF, unit_H.astype(block_HF.dtype))
        square += float(np.einsum("f,f->", sum_F, sum_F))
    # |Σ u|² = Σ |u|² + 2 Σ_{i<j} u_i·u_j, and there are n (n - 1) / 2 pairs.
    return norms_H, (square - np.count_nonzero(norms_H)) / (n * (n - 1))


def _norms(heads_HF: Array) -> NDArray[np.float64]:
    """Return each head's norm; NaN or infinite if and only if one of its numbers is."""
    square_H = np.zeros(len(heads_HF))
    with np.errstate(over="ignore", invalid="ignore"):
        for block_HF in _blocks(heads_HF):
            square_H += np.einsum("hf,hf->h", block_HF, block_HF)
        if ((square_H > 1e-20) & np.isfinite(square_H)).all():
            return np.sqrt(square_H)
        # Some squares may have left float32's range: divide by the largest number first.
        exact_HF = heads_HF.astype(np.float64)
        peak_H = np.abs(exact_HF).max(axis=1)
        exact_HF /= np.where(peak_H > 0, peak_H, 1)[:, None]
        norms_H: NDArray[np.float64] = peak_H * np.sqrt(np.einsum("hf,hf->h", exact_HF, exact_HF))
        return norms_H


def _blocks(heads_HF: Array) -> Iterator[Array]:
    """Yield pieces of all heads side by side, each a fresh array of float32 (float64 for float64)."""
    dtype = np.float64 if heads_HF.dtype == np.float64 else np.float32
    width = max(1, _BLOCK // len(heads_HF))
    for start in range(0, heads_HF.shape[1], width):
        yield heads_HF[:, start : start + width].astype(dtype)
