"""Rounding from float64 happens once, to nearest, ties to even."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convert.layer_tensors.rounding import round_once, rounded, widen
from model.common.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)


def nearest_bfloat16(x: float) -> np.float32:
    """Round by trying the neighbours, in exact arithmetic."""
    near = np.float32(x).view(np.uint32) & np.uint32(0xFFFF0000)
    bits = [int(near) + step * 0x10000 for step in (-1, 0, 1, 2) if 0 <= int(near) + step * 0x10000 < 2**32]
    values = [np.uint32(b).view(np.float32) for b in bits]
    candidates = [(b, v) for b, v in zip(bits, values, strict=True) if np.isfinite(v)]
    return min(candidates, key=lambda c: (abs(Fraction(float(c[1])) - Fraction(x)), (c[0] >> 16) & 1))[1]


@given(st.floats(-1e30, 1e30, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-30))
@example(1 + 2**-8 + 2**-40)  # just above a midpoint, which float32 rounds onto it
@example(1 + 2**-8 - 2**-40)
@example(-(1 + 3 * 2**-8 - 2**-45))
@example(1 + 2**-8)  # a true tie, to even
@example(1 + 3 * 2**-8)
def test_bfloat16_is_the_nearest(x):
    assert round_once(np.array([x]), BF16).astype(np.float32)[0] == nearest_bfloat16(x)


def test_a_number_too_large_for_the_dtype_is_refused():
    with pytest.raises(CheckpointError, match=r"x\.weight does not fit into its dtype float16; use --method mean"):
        rounded("x.weight", np.array([1e6]), np.dtype(np.float16))


def test_a_plain_cast_would_be_wrong():
    """Shows why round_once exists: the cast of ml_dtypes rounds this number twice, and down."""
    x = np.array([1 + 2**-8 + 2**-40])
    assert float(x.astype(BF16)[0]) == 1.0
    assert float(round_once(x, BF16)[0]) == 1 + 2**-7


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BF16])
def test_up_and_down_again_is_the_identity(dtype):
    dtype = np.dtype(dtype)
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(dtype) if dtype.itemsize == 2 else np.random.default_rng(0).normal(size=1000).astype(dtype)
    values = values[np.isfinite(values.astype(np.float32))]
    assert round_once(widen(values).astype(np.float64), dtype).tobytes() == values.tobytes()
