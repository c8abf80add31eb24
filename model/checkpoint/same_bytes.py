"""Compare tensors byte for byte, a block at a time, or by some of their rows."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.checkpoint.interface import Checkpoint
from model.checkpoint.tensor import Array

_BLOCK = 8 << 20
"""Bytes of each tensor that are in memory at once."""


def same_bytes(first: Checkpoint, name: str, second: Checkpoint, other_name: str) -> bool:
    """Return whether two tensors, of one checkpoint or of two, have the same dtype, shape and bytes."""
    one, other = first.tensors[name], second.tensors[other_name]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if first.span(name) is not None and first.span(name) == second.span(other_name):
        return True
    blocks = ((first.rows(name, *rows), second.rows(other_name, *rows)) for rows in one.row_blocks(_BLOCK))
    return all(np.array_equal(_bytes(a), _bytes(b)) for a, b in blocks)


def sampled_rows(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    """Yield the first, the middle and the last row of a tensor; nothing for a scalar."""
    shape = checkpoint.tensors[name].shape
    n_rows = shape[0] if shape else 0
    for start in sorted({0, n_rows // 2, n_rows - 1}) if n_rows else ():
        yield checkpoint.rows(name, start, start + 1).tobytes()


def _bytes(rows: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8)
