"""Between a tensor's own dtype and float64: exact on the way up, rounded exactly once on the way down."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from model.checkpoint import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def widen(values: Array) -> Array:
    """Return `values` as float32, which holds every half-precision number exactly; float64 stays as it is."""
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)


def round_once(values: NDArray[np.float64], dtype: np.dtype[Any]) -> Array:
    """Round float64 to `dtype`, to nearest even. Values must be finite.

    A plain cast to bfloat16 goes through float32 and rounds twice (in ml_dtypes as in torch); where the first rounding
    lands on the midpoint of two bfloat16 numbers, the second may go the wrong way. Those are nudged off the midpoint.
    """
    if dtype != BFLOAT16:
        return values.astype(dtype)
    single = values.astype(np.float32)
    in_doubt = ((single.view(np.uint32) & 0xFFFF) == 0x8000) & (single != values)
    if in_doubt.any():
        towards = np.where(values[in_doubt] > single[in_doubt], np.inf, -np.inf).astype(np.float32)
        single[in_doubt] = np.nextafter(single[in_doubt], towards)
    return single.astype(dtype)
