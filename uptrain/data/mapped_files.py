"""Map arrays from the files of a token cache or of a teacher's logits."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model.common.errors import InputError


def map_array(path: Path, dtype: str, shape: tuple[int, ...], advice: str) -> npt.NDArray[Any]:
    """Return the little-endian array of a whole file.

    Raises InputError, which ends with `advice`, if the file is missing or of another size.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    expected = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    size = path.stat().st_size if path.is_file() else None
    if size is None:
        raise InputError(f"{path}, which the manifest names, is missing; {advice}.")
    if size != expected:
        raise InputError(f"{path} has {size} bytes where the manifest says {expected}; {advice}.")
    return np.memmap(path, dtype=kind, mode="r", shape=shape) if expected else np.empty(shape, kind)
