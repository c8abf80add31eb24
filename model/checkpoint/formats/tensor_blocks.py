"""Assemble tensors from blocks in different files, a few rows at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from model.checkpoint.tensor import Array

_MAX_COMPARISONS = 20_000_000
"""Comparisons of two blocks that take some seconds."""


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor, as a view of a mapped file."""

    start: tuple[int, ...]
    """Index of the block's first element in the whole tensor."""
    array: Array

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(first + n for first, n in zip(self.start, self.array.shape, strict=True))


def concatenation(arrays: Sequence[Array], axis: int) -> tuple[TensorBlock, ...]:
    """Return arrays as the blocks of their concatenation."""
    blocks, position = [], 0
    for array in arrays:
        blocks.append(TensorBlock((0,) * axis + (position,) + (0,) * (array.ndim - axis - 1), array))
        position += array.shape[axis]
    return tuple(blocks)


def fill_exactly(blocks: Sequence[TensorBlock], shape: tuple[int, ...]) -> bool:
    """Return whether the blocks fill `shape`: all lie inside, none overlap, no gap remains.

    Blocks that would take minutes to compare, which no framework writes, count as overlapping.
    """
    if any(not all(0 <= a <= b <= n for a, b, n in zip(b.start, b.stop, shape, strict=True)) for b in blocks):
        return False
    filled = sum(block.array.size for block in blocks)
    return filled == prod(shape) and not _any_overlap([block for block in blocks if block.array.size])


def _any_overlap(blocks: Sequence[TensorBlock]) -> bool:
    """Compare the blocks that overlap on the axis along which most of them lie.

    Sorted on that axis, these follow each other, so blocks in a line take little more than the sorting.
    """
    if not blocks or not blocks[0].start:
        return len(blocks) > 1
    n_starts = [len({block.start[axis] for block in blocks}) for axis in range(len(blocks[0].start))]
    axis = n_starts.index(max(n_starts))
    ordered = sorted(blocks, key=lambda block: block.start[axis])
    # Of a grid, those with the same start overlap on the axis.
    n_left = min(len(blocks) * (len(blocks) // n_starts[axis] + 64), _MAX_COMPARISONS)
    for i, x in enumerate(ordered):
        for j in range(i + 1, len(ordered)):
            y = ordered[j]
            if y.start[axis] >= x.stop[axis]:
                break
            n_left -= 1
            if not n_left:
                return True
            if all(max(a, c) < min(b, d) for a, b, c, d in zip(x.start, x.stop, y.start, y.stop, strict=True)):
                return True
    return False


def extent(blocks: Sequence[TensorBlock]) -> tuple[int, ...]:
    """Return the shape of the smallest tensor that contains all blocks."""
    return tuple(max(stops) for stops in zip(*(block.stop for block in blocks), strict=True))


def whole_rows(blocks: Sequence[TensorBlock], start: int, stop: int) -> Array:
    """Return rows `start:stop` of the tensor that the blocks fill: a view of a single block, a copy of several."""
    if len(blocks) == 1:
        return np.atleast_1d(blocks[0].array)[start:stop]  # a scalar has no rows
    out = np.empty((stop - start, *extent(blocks)[1:]), blocks[0].array.dtype)
    for block in blocks:
        top = block.start[0]
        first, last = max(start, top), min(stop, block.stop[0])
        if first < last:
            columns = tuple(slice(a, b) for a, b in zip(block.start[1:], block.stop[1:], strict=True))
            out[(slice(first - start, last - start), *columns)] = block.array[first - top : last - top]
    return out


def rows_of_heads(
    stored_rows: Callable[[int, int], Array], heads: Sequence[int], head_dim: int, start: int, stop: int
) -> Array:
    """Return rows `start:stop` of a tensor that consists of the given heads of the tensor behind `stored_rows`."""
    pieces = []
    for i in range(start // head_dim, -(-stop // head_dim)):
        first, last = max(start - i * head_dim, 0), min(stop - i * head_dim, head_dim)
        pieces.append(stored_rows(heads[i] * head_dim + first, heads[i] * head_dim + last))
    return np.concatenate(pieces)
