"""Describe tensors: name, dtype, shape, and the file range of their bytes.

Dtypes of all formats have their names in the safetensors format (`BF16`, `F32`, …).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from model.common.errors import CheckpointError

Array = NDArray[Any]

ROPE_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Ends of the names of a module's RoPE frequencies and tables in old checkpoints. The config gives them, too."""

MASKED_BIAS = "attention.masked_bias"
"""End of the name of the number that old GPT-NeoX checkpoints put in place of masked logits."""

# Bits, because the format has types smaller than a byte (safetensors 0.8, README "Format").
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# The dtypes that computations support. Tensors of other dtypes are only copied.
FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What torch calls them."""


def is_rope_buffer(name: str) -> bool:
    """Return whether the tensor of this name holds RoPE frequencies, or a table made of them."""
    return name.endswith(ROPE_BUFFERS)


def layer_number(name: str) -> int | None:
    """Return the layer in a tensor's name; None for the embedding, the LM head and the last norm."""
    match = re.search(r"\.([0-9]{1,6})\.", name)
    return int(match[1]) if match else None


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype of a tensor's numbers: unsigned integers of its size if computations do not support it.

    Raises CheckpointError for numbers of less than a byte.
    """
    if BITS[dtype] % 8:
        raise CheckpointError(f"numbers of dtype {dtype} are packed in bytes, and cannot be read one by one.")
    return FLOAT_DTYPES.get(dtype) or np.dtype(f"u{BITS[dtype] // 8}")


@dataclass(frozen=True)
class TensorInfo:
    """The description of a tensor; `nbytes` is its size on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (prod(self.shape) * BITS[self.dtype] + 7) // 8

    def row_blocks(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of row ranges of about `nbytes` at most, but at least one row. A scalar has one row."""
        n_rows = self.shape[0] if self.shape else 1
        step = max(1, nbytes * n_rows // max(self.nbytes, 1))
        for start in range(0, n_rows, step):
            yield start, min(start + step, n_rows)


@dataclass(frozen=True)
class Span:
    """A range of bytes in a file that can be copied verbatim."""

    path: Path
    offset: int
    length: int


def is_buffer(tensor: TensorInfo) -> bool:
    """Return whether a tensor is no parameter: RoPE frequencies, or a causal mask of old GPT-NeoX checkpoints."""
    return is_rope_buffer(tensor.name) or tensor.dtype in ("BOOL", "U8") or tensor.name.endswith(MASKED_BIAS)
