"""Read compressed files in pieces of bounded size, because a small file may decompress to more than the memory.

Damaged and truncated files are refused.
"""

import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

from model.common.errors import InputError

BLOCK_BYTES = 1 << 16
BUFFER_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
"""Largest number of decompressed bytes per step."""
MAX_LINE_BYTES = 256 << 20
"""Size limit of a line or a text file; a larger one cannot be a document to tokenise."""
MAX_WINDOW_BYTES = 256 << 20
"""Limit of the decompressor's window, which the file chooses. The presets of xz need 65 MiB; zstd without --long 8."""
ZSTD_STEP_BYTES = 1 << 10
"""Input bytes per step of zstandard, which cannot bound its output: 4 bytes give 128 KiB at most, so 32 MiB a step."""


class _Gzip:
    """One member of a gzip file. `decompress` returns at most PIECE_BYTES, and keeps the unused input."""

    error: type[Exception] = zlib.error
    padding = 1
    """Zero bytes may follow a member in multiples of this number; 0: none may."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    @property
    def needs_input(self) -> bool:
        return not self._member.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, block: bytes) -> bytes:
        return self._member.decompress(self._member.unconsumed_tail + block, PIECE_BYTES)


class _Xz:
    """One stream of an xz file."""

    error: type[Exception] = lzma.LZMAError
    padding = 4

    def __init__(self) -> None:
        self._stream = lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES)

    @property
    def needs_input(self) -> bool:
        return self._stream.needs_input

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, block: bytes) -> bytes:
        return self._stream.decompress(block, PIECE_BYTES)


class _Zstd:
    """One frame of a zstd file."""

    padding = 0

    def __init__(self) -> None:
        try:
            zstandard: Any = importlib.import_module("zstandard")
        except ModuleNotFoundError as error:
            raise InputError("reading .zst files needs the zstandard package: pip install zstandard.") from error
        self.error: type[Exception] = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        self._rest = memoryview(b"")

    @property
    def needs_input(self) -> bool:
        return not self._rest

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data) + bytes(self._rest)

    def decompress(self, block: bytes) -> bytes:
        rest = memoryview(block) if block else self._rest
        self._rest = rest[ZSTD_STEP_BYTES:]
        return bytes(self._frame.decompress(rest[:ZSTD_STEP_BYTES]))


KINDS: dict[str, Callable[[], "_Gzip | _Xz | _Zstd"]] = {".gz": _Gzip, ".xz": _Xz, ".zst": _Zstd}
"""Suffix → the class that decompresses one member of the file."""

SUFFIXES = tuple(KINDS)
COMMANDS = {".gz": "gzip -dc", ".xz": "xz -dc", ".zst": "zstd -dc"}
"""Suffix → the command that decompresses a file, for messages."""


def check(path: str) -> None:
    """Raise InputError if the file's format needs a package that is not installed."""
    KINDS[Path(path).suffix.lower()]()


def is_compressed(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def open_compressed(raw: BinaryIO, path: str) -> io.BufferedReader:
    """Return the content of an open compressed file. Reading raises EOFError if it is damaged or truncated."""
    return io.BufferedReader(_Decompressed(raw, path), BUFFER_BYTES)


@contextmanager
def open_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file, compressed or not. Reading raises EOFError if compressed data is damaged or truncated."""
    with Path(path).open("rb") as raw:
        if not is_compressed(path):
            yield raw
            return
        with open_compressed(raw, path) as stream:
            yield stream


def lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of bytes read from the compressed file, and the next line.

    Raises InputError for a line too long, and for damaged or truncated data.
    """
    n_lines = 0
    with Path(path).open("rb") as raw, open_compressed(raw, path) as stream:
        try:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                n_lines += 1
                if len(line) > MAX_LINE_BYTES:
                    refuse_long_line(path, n_lines)
                yield raw.tell(), line
        except EOFError as error:
            raise InputError(f"{path}:{n_lines + 1}: the compressed data is {error}; fetch the file again.") from error


def refuse_long_line(path: str, number: int) -> NoReturn:
    raise InputError(
        f"{path}:{number}: the line is longer than {MAX_LINE_BYTES:,} bytes, which is no document; divide it, or leave "
        "it out."
    )


class _Decompressed(io.RawIOBase):
    """The content of a compressed file of one or several members. Raises EOFError if it is damaged or truncated.

    (The readers of the `gzip` and `zstandard` packages accept some damaged files as complete.)
    """

    def __init__(self, raw: BinaryIO, path: str) -> None:
        self._raw = raw
        self._make = KINDS[Path(path).suffix.lower()]
        self._member = self._make()
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            if not self._member.eof:
                self._content = memoryview(self._step())
            elif not self._begin_next():
                return 0
        n = min(len(buffer), len(self._content))
        buffer[:n] = self._content[:n]
        self._content = self._content[n:]
        return n

    def _step(self, block: bytes = b"") -> bytes:
        """Decompress `block`, the first bytes of a member, or else the next bytes. The result may be empty."""
        is_at_end = False
        if not block and self._member.needs_input:
            block = self._raw.read(BLOCK_BYTES)
            is_at_end = not block
        try:
            content = self._member.decompress(block)
        except self._member.error as error:
            raise EOFError(f"damaged ({error})") from error
        if is_at_end and not content and not self._member.eof:
            raise EOFError("cut off")
        return content

    def _begin_next(self) -> bool:
        """Skip the zeros that pad a tape or disk block, begin the next member, and return whether there is one."""
        block, n_zeros = self._member.unused_data, 0
        while True:
            rest = block.lstrip(b"\0") if self._member.padding else block
            n_zeros += len(block) - len(rest)
            if rest:
                break
            block = self._raw.read(BLOCK_BYTES)
            if not block:
                break
        if n_zeros and n_zeros % self._member.padding:
            raise EOFError("damaged (padding of a wrong length)")
        if not rest:
            return False
        self._member = self._make()
        self._content = memoryview(self._step(rest))
        return True
