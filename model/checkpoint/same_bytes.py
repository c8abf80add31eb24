"""Compare tensors byte for byte, a block at a time."""

import numpy as np

from model.checkpoint.interface import Checkpoint

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
    return all(np.array_equal(*(np.ascontiguousarray(block).view(np.uint8) for block in pair)) for pair in blocks)
