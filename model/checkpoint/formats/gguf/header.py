"""Read the header of a GGUF file: its keys, and where its tensors are.

Every count and length is checked against the file's size, and against limits above any real model. The limits below
bound the time and memory of reading. (The gguf package's reader trusts a file, and makes several objects of each token:
half a gigabyte for a vocabulary of 150,000.)

Format (ggml, docs/gguf.md): magic, version, number of tensors, number of key-value pairs; the pairs (name, type,
value); for each tensor its name, number of dimensions, dimensions, type and offset; padding to the alignment; the data.
Numbers are little-endian; a string is a 64-bit length and UTF-8.
"""

import mmap
import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type number → its code in `struct`."""


class StoredTensor(NamedTuple):
    """A tensor as it lies in the file. Its rows follow each other."""

    name: str
    kind: str
    """The type of its values, as ggml calls it: F32, BF16, Q4_K, …"""
    shape: tuple[int, ...]
    """The number of rows first. (The file has it last.)"""
    offset: int
    """Bytes from the beginning of the file."""
    nbytes: int


class Header(NamedTuple):
    fields: dict[str, Any]
    """Key → value."""
    tensors: list[StoredTensor]


def read_header(path: Path) -> Header:
    """Return a file's header. Raises CheckpointError unless it is valid and every tensor's data lies in the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file, or is truncated: it does not begin with {MAGIC.decode()}."
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _HeaderParser(path, content, size).parse()


class _HeaderParser:
    """A parser that reads a header from front to back; `_at` is the offset of the next byte."""

    def __init__(self, path: Path, content: mmap.mmap, size: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES

        self._path, self._content, self._size = path, content, size
        self._kinds = {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
        self._end = min(size, MAX_HEADER)
        self._at = len(MAGIC)
        self._n_elements = 0

    def parse(self) -> Header:
        version = self._number("I")
        if version and version & 0xFFFF == 0:
            self._refuse("it is big-endian, which is not supported; convert it to little-endian (gguf-convert-endian)")
        if version not in VERSIONS:
            self._refuse(f"it is of version {version}; supported are {' and '.join(map(str, VERSIONS))}")
        n_tensors, n_pairs = self._number("Q"), self._number("Q")
        if n_tensors > MAX_TENSORS or n_pairs > MAX_PAIRS:
            self._refuse(f"it states {n_tensors:,} tensors and {n_pairs:,} keys, more than any model has")
        pairs = [self._pair() for _ in range(n_pairs)]
        fields = dict(pairs)
        if len(fields) < n_pairs:
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            self._refuse(f"the key {name} occurs twice")
        tensors = [self._tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        return Header(fields, self._placed(tensors, alignment))

    def _pair(self) -> tuple[str, Any]:
        name, kind = self._bytes(), self._number("I")
        if not (len(name) <= MAX_NAME and name.isascii() and name.decode().isprintable()):
            self._refuse(f"a key is not {MAX_NAME} printable ASCII characters at most")
        if name == b"general.alignment" and kind != UINT32:
            self._refuse("its general.alignment is not a 32-bit number")
        value: Any = self._array() if kind == ARRAY else self._text() if kind == STRING else self._numbers(kind, 1)[0]
        if name == b"general.alignment" and (not 1 <= value <= MAX_ALIGNMENT or value & (value - 1)):
            self._refuse(f"its alignment is {value}, which is not a power of two up to {MAX_ALIGNMENT}")
        return name.decode(), value

    def _array(self) -> list[Any]:
        kind, n = self._number("I"), self._number("Q")
        if kind == ARRAY:
            self._refuse("it has an array of arrays, which no supported model has")
        self._n_elements += n
        if self._n_elements > MAX_ELEMENTS:
            self._refuse(f"its arrays have more than {MAX_ELEMENTS:,} elements")
        return [self._text() for _ in range(n)] if kind == STRING else self._numbers(kind, n)

    def _tensor(self) -> StoredTensor:
        """Return a tensor, with its offset from the first tensor's data."""
        name = self._bytes().decode(errors="replace")
        if len(repr(name)) > MAX_NAME:
            self._refuse(f"a tensor's name has {len(name):,} characters")
        n_dimensions = self._number("I")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            self._refuse(f"the tensor {name!r} has {n_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = [self._number("Q") for _ in range(n_dimensions)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in self._kinds:
            self._refuse(f"the tensor {name!r} is of the unknown type {kind}")
        kind_name, block, block_bytes = self._kinds[kind]
        if 0 in shape or shape[0] % block:
            self._refuse(f"the tensor {name!r} has the impossible shape {shape}")
        return StoredTensor(name, kind_name, tuple(reversed(shape)), offset, prod(shape) // block * block_bytes)

    def _placed(self, tensors: list[StoredTensor], alignment: int) -> list[StoredTensor]:
        """Return the tensors with their offsets in the file.

        Raises CheckpointError for tensors that have the same name, overlap, or extend beyond the end of the file.
        """
        start = -(-self._at // alignment) * alignment
        end, names = 0, set()
        for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.name in names:
                self._refuse(f"it holds the duplicated tensor {tensor.name!r}")
            names.add(tensor.name)
            if tensor.offset < end or tensor.offset % alignment:
                self._refuse("its tensors overlap, or are not aligned")
            end = tensor.offset + tensor.nbytes
        if start + end > self._size:
            self._refuse(f"it is truncated: its header describes {start + end:,} bytes, the file has {self._size:,}")
        return [tensor._replace(offset=start + tensor.offset) for tensor in tensors]

    def _numbers(self, kind: int, n: int) -> list[Any]:
        if kind not in SCALARS:
            self._refuse(f"it has a value of the unknown type {kind}")
        layout, at = f"<{n}{SCALARS[kind]}", self._at
        self._skip(struct.calcsize(layout))
        return list(struct.unpack_from(layout, self._content, at))

    def _number(self, code: str) -> int:
        at = self._at
        self._skip(struct.calcsize(f"<{code}"))
        number: int = struct.unpack_from(f"<{code}", self._content, at)[0]
        return number

    def _text(self) -> str:
        try:
            return self._bytes().decode()
        except UnicodeDecodeError:
            self._refuse("it is damaged: a text is not UTF-8")

    def _bytes(self) -> bytes:
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
