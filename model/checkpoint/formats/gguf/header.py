"""Check the header of a GGUF file before the gguf package reads it.

The gguf package's reader trusts every count and length in a file. Here each is checked against the file's size and
against limits above any real model. The limits below bound the time and memory of this check.

Format (ggml, docs/gguf.md): magic, version, number of tensors, number of key-value pairs; the pairs (name, type,
value); for each tensor its name, number of dimensions, dimensions, type and offset; padding to the alignment; the data.
Numbers are little-endian; a string is a 64-bit length and UTF-8.
"""

import mmap
import struct
from math import prod
from pathlib import Path
from typing import NoReturn

from model.common.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 100_000_000
"""Limit of the bytes before the data. A vocabulary of 256,000 tokens takes about 20 MB."""
MAX_ELEMENTS = 1 << 21
"""Limit of the elements of all arrays. A vocabulary of 256,000 tokens has 1.3 million, with merges, scores, types."""
MAX_PAIRS = MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
MAX_NAME = 256
"""Limit of the characters of a key or a tensor's name. (llama.cpp allows 64.)"""

STRING, ARRAY, UINT32 = 8, 9, 4
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type number → bytes: integers of 8 to 32 bits, float32, bool, integers of 64 bits, float64."""


def check_header(path: Path) -> None:
    """Raise CheckpointError unless the file's header is valid and every tensor's data lies inside the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file, or is truncated: it does not begin with {MAGIC.decode()}."
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _HeaderParser(path, content, size).check()


class _HeaderParser:
    """A parser that reads a header from front to back; `_at` is the offset of the next byte."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES

        self._path, self._content, self._size = path, content, size
        self._block_sizes = {kind.value: sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        self._end = min(size, MAX_HEADER)
        self._at = len(MAGIC)
        self._n_elements = 0
        self._alignment = 32

    def check(self) -> None:
        version = self._number("I")
        if version and version & 0xFFFF == 0:
            self._refuse("it is big-endian, which is not supported; convert it to little-endian (gguf-convert-endian)")
        if version not in VERSIONS:
            self._refuse(f"it is of version {version}; supported are {' and '.join(map(str, VERSIONS))}")
        n_tensors, n_pairs = self._number("Q"), self._number("Q")
        if n_tensors > MAX_TENSORS or n_pairs > MAX_PAIRS:
            self._refuse(f"it states {n_tensors:,} tensors and {n_pairs:,} keys, more than any model has")
        for _ in range(n_pairs):
            self._pair()
        spans = [self._tensor() for _ in range(n_tensors)]
        self._check_data(spans)

    def _pair(self) -> None:
        name, kind = self._string(), self._number("I")
        if not (len(name) <= MAX_NAME and name.isascii() and name.decode().isprintable()):
            self._refuse(f"a key is not {MAX_NAME} printable ASCII characters at most")
        if name == b"general.alignment":
            if kind != UINT32:
                self._refuse("its general.alignment is not a 32-bit number")
            self._alignment = self._number("I")
            if not 1 <= self._alignment <= MAX_ALIGNMENT or self._alignment & (self._alignment - 1):
                self._refuse(f"its alignment is {self._alignment}, which is not a power of two up to {MAX_ALIGNMENT}")
        elif kind == ARRAY:
            self._array()
        elif kind == STRING:
            self._string()
        else:
            self._skip(self._scalar_bytes(kind))

    def _array(self) -> None:
        kind, n = self._number("I"), self._number("Q")
        if kind == ARRAY:
            self._refuse("it has an array of arrays, which no Llama model has")
        self._n_elements += n
        if self._n_elements > MAX_ELEMENTS:
            self._refuse(f"its arrays have more than {MAX_ELEMENTS:,} elements")
        if kind != STRING:
            self._skip(n * self._scalar_bytes(kind))
            return
        for _ in range(n):
            self._string()

    def _tensor(self) -> tuple[int, int]:
        """Return the offset of a tensor's data from the first tensor's data, and its number of bytes."""
        name = repr(self._string().decode(errors="replace"))
        if len(name) > MAX_NAME:
            self._refuse(f"a tensor's name has {len(name):,} characters")
        n_dimensions = self._number("I")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            self._refuse(f"the tensor {name} has {n_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = [self._number("Q") for _ in range(n_dimensions)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in self._block_sizes:
            self._refuse(f"the tensor {name} is of the unknown type {kind}")
        block, block_bytes = self._block_sizes[kind]
        if 0 in shape or shape[0] % block:
            self._refuse(f"the tensor {name} has the impossible shape {shape}")
        return offset, prod(shape) // block * block_bytes

    def _check_data(self, spans: list[tuple[int, int]]) -> None:
        """Raise CheckpointError for tensors that overlap, or extend beyond the end of the file."""
        start = -(-self._at // self._alignment) * self._alignment
        end = 0
        for offset, nbytes in sorted(spans):
            if offset < end or offset % self._alignment:
                self._refuse("its tensors overlap, or are not aligned")
            end = offset + nbytes
        if start + end > self._size:
            self._refuse(f"it is truncated: its header describes {start + end:,} bytes, the file has {self._size:,}")

    def _scalar_bytes(self, kind: int) -> int:
        if kind not in SCALAR_BYTES:
            self._refuse(f"it has a value of the unknown type {kind}")
        return SCALAR_BYTES[kind]

    def _number(self, kind: str) -> int:
        at = self._at
        self._skip(struct.calcsize(f"<{kind}"))
        number: int = struct.unpack_from(f"<{kind}", self._content, at)[0]
        return number

    def _string(self) -> bytes:
        length = self._number("Q")
        at = self._at
        self._skip(length)
        return self._content[at : self._at]

    def _skip(self, n: int) -> None:
        if n > self._end - self._at:
            self._refuse(
                f"its header does not end within {self._end:,} bytes"
                if self._end < self._size
                else "it is truncated, or states lengths beyond its end"
            )
        self._at += n

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path} is not a GGUF file that can be read: {reason}.")
