"""Whether blocks fill a tensor: by painting them, and quickly if there are many."""

import time
from itertools import pairwise

import numpy as np
import pytest

from model.checkpoint.formats.tensor_blocks import TensorBlock, fill_exactly


def painted(blocks, shape):
    """Return whether each place is painted once."""
    counts = np.zeros(shape, int)
    for block in blocks:
        counts[tuple(slice(a, b) for a, b in zip(block.start, block.stop, strict=True))] += 1
    return bool((counts == 1).all())


@pytest.mark.parametrize("seed", range(40))
def test_against_painting(seed):
    rng = np.random.default_rng(seed)
    rows, columns = sorted({0, 6, *rng.integers(1, 6, 2)}), sorted({0, 5, *rng.integers(1, 5, 2)})
    blocks = [TensorBlock((a, c), np.zeros((b - a, d - c))) for a, b in pairwise(rows) for c, d in pairwise(columns)]
    blocks = [blocks[i] for i in rng.permutation(len(blocks))]
    assert fill_exactly(blocks, (6, 5)) and painted(blocks, (6, 5))
    moved = [*blocks[1:], TensorBlock(tuple(rng.integers(0, 2, 2)), blocks[0].array)]
    inside = all(b <= n for block in moved for b, n in zip(block.stop, (6, 5), strict=True))
    assert fill_exactly(moved, (6, 5)) == (inside and painted(moved, (6, 5)))


@pytest.mark.parametrize("axis", [0, 1])
def test_many_blocks_in_a_line(axis):
    blocks = [TensorBlock((i, 0) if axis == 0 else (0, i), np.zeros((1, 1))) for i in range(20_000)]
    shape = (20_000, 1) if axis == 0 else (1, 20_000)
    started = time.process_time()
    assert fill_exactly(blocks, shape)
    assert not fill_exactly([*blocks[:-1], blocks[0]], shape)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("shape", [(4000, 1), (63, 63), (1, 4000), (250, 16), (17, 17, 17), (4, 4, 4, 4, 4)])
def test_blocks_of_a_grid_are_compared_in_full(shape):
    array = np.zeros((1,) * len(shape), np.float32)
    blocks = [TensorBlock(start, array) for start in np.ndindex(shape)]
    assert fill_exactly(blocks, shape)


def test_blocks_in_an_order_of_no_framework_take_bounded_time():
    """Columns over all rows, and single rows beside them: each column overlaps all rows on either axis."""
    n = 6000
    column, row = np.zeros((n, 1), np.float32), np.zeros((1, n), np.float32)
    blocks = [TensorBlock((0, i), column) for i in range(n)] + [TensorBlock((i, n), row) for i in range(n)]
    begun = time.process_time()
    assert not fill_exactly(blocks, (n, 2 * n))
    assert time.process_time() - begun < 10
