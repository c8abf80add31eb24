"""What a reader tells about a tensor: name, dtype, shape, and where its bytes lie.

Dtypes are named as in the safetensors format (`BF16`, `F32`, …), whatever format the tensor comes from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Bits, because the format knows types smaller than a byte (safetensors 0.8, README "Format").
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# The dtypes that weights are computed in. Everything else is only ever copied.
FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor's description; `nbytes` is its size on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (prod(self.shape) * BITS[self.dtype] + 7) // 8

    def row_blocks(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of rows that are at most about `nbytes` together, one row at least."""
        n_rows = self.shape[0]
        step = max(1, nbytes * n_rows // max(self.nbytes, 1))
        for start in range(0, n_rows, step):
            yield start, min(start + step, n_rows)


@dataclass(frozen=True)
class Span:
    """A run of bytes in a file, ready to be copied as it is."""

    path: Path
    offset: int
    length: int
