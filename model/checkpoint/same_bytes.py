"""Compare tensors byte for byte, a block at a time, or by samples."""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.checkpoint.interface import Checkpoint
from model.checkpoint.tensor import Array

_BLOCK = 8 << 20
"""Bytes of each tensor that are in memory at once."""
_SAMPLE = 4096
"""Bytes of a sample."""


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


def digest_of_samples(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 of some bytes of each tensor: of its beginning, its middle and its end.

    Models of one architecture differ in it, which sizes, names and times of their files may not.
    """
    sha256 = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        for sample in _samples(checkpoint, name):
            sha256.update(sample)
    return sha256.hexdigest()


def _samples(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    span = checkpoint.span(name)
    if span is None:
        yield from sampled_rows(checkpoint, name)
        return
    with span.path.open("rb") as file:
        for offset in sorted({0, span.length // 2, max(0, span.length - _SAMPLE)}):
            file.seek(span.offset + offset)
            yield file.read(min(_SAMPLE, span.length - offset))


def _bytes(rows: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8)
