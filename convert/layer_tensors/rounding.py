"""Convert between a tensor's own dtype and float64: widen exactly, and round exactly once."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from convert.layer_tensors.head_matrices import Real
from model.checkpoint import Array, Checkpoint
from model.common.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPE_ADVICE = "use --dtype bfloat16"
"""What to do if a number of latent attention is too large for the output's dtype."""


def widen(values: Array) -> Array:
    """Return `values` as float32, which represents every half-precision number exactly. float64 stays float64."""
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)


def tensors_to_float64(tensors: Mapping[str, Array]) -> dict[str, Real]:
    """Return tensors, by name, as float64."""
    return {name: values.astype(np.float64) for name, values in tensors.items()}


def round_once(values: NDArray[np.float64], dtype: np.dtype[Any]) -> Array:
    """Round float64 to `dtype`, to nearest even. Values must be finite.

    A plain cast to bfloat16 goes through float32 and rounds twice (in ml_dtypes as in torch). If the first rounding
    gives the midpoint of two bfloat16 numbers, the second may round the wrong way. Such values are moved off the
    midpoint by one float32 step, towards the exact value.
    """
    if dtype != BFLOAT16:
        return values.astype(dtype)
    single = values.astype(np.float32)
    ambiguous = ((single.view(np.uint32) & 0xFFFF) == 0x8000) & (single != values)
    if ambiguous.any():
        towards = np.where(values[ambiguous] > single[ambiguous], np.inf, -np.inf).astype(np.float32)
        single[ambiguous] = np.nextafter(single[ambiguous], towards)
    return single.astype(dtype)


def read_finite(checkpoint: Checkpoint, name: str) -> Real:
    """Read a tensor as float64. Raises CheckpointError for NaN or infinity."""
    return read_finite_rows(checkpoint, name, 0, checkpoint.tensors[name].shape[0])


def read_finite_rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Real:
    """Read rows `start` to `stop` of a tensor as float64. Raises CheckpointError for NaN or infinity."""
    with np.errstate(invalid="ignore"):  # a cast of a signalling NaN; the check below refuses it
        values: Real = widen(checkpoint.rows(name, start, stop)).astype(np.float64)
    if not np.isfinite(values).all():
        raise CheckpointError(f"the tensor {name} holds NaN or infinite values; the checkpoint is damaged.")
    return values


def rounded(name: str, values: Real, dtype: np.dtype[Any], advice: str = "use --method mean") -> Array:
    """Round a computed tensor. Raises CheckpointError, with an advice, if it is too large for the dtype."""
    with np.errstate(over="ignore"):  # the check below refuses what overflows
        result = round_once(np.ascontiguousarray(values), dtype)
    if not np.isfinite(result.astype(np.float64)).all():
        raise CheckpointError(f"the converted {name} does not fit into its dtype {dtype}; {advice}.")
    return result
