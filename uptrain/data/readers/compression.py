"""Compressed files, line by line. Where the data is damaged or cut off, the file is refused, with the line's number."""

import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from model.errors import InputError

BLOCK_BYTES = 1 << 16
BUFFER_BYTES = 1 << 20


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    try:
        zstandard = importlib.import_module("zstandard")
    except ModuleNotFoundError as error:
        raise InputError("reading .zst files needs the zstandard package: pip install zstandard.") from error
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


KINDS: dict[str, Callable[[], tuple[Callable[[], Any], type[Exception]]]] = {
    ".gz": lambda: (lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), zlib.error),
    ".xz": lambda: (lzma.LZMADecompressor, lzma.LZMAError),
    ".zst": _zstd,
}
"""By suffix: what makes a decompressor of one member of the file, and the error it raises."""

SUFFIXES = tuple(KINDS)


def check(path: str) -> None:
    """Raise InputError if the file's kind needs a package that is not installed."""
    KINDS[Path(path).suffix]()


def is_compressed(path: str) -> bool:
    return path.endswith(SUFFIXES)


def lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield how many bytes of the file have been read, and the next line."""
    n_lines = 0
    with Path(path).open("rb") as raw, io.BufferedReader(_Decompressed(raw, path), BUFFER_BYTES) as stream:
        try:
            for line in stream:
                n_lines += 1
                yield raw.tell(), line
        except EOFError as error:
            raise InputError(f"{path}:{n_lines + 1}: the compressed data is {error}; fetch the file anew.") from error


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, of one member or several. Raises EOFError where that is damaged or ends early.

    (What `gzip` and `zstandard` have for this takes some damaged files for complete ones.)
    """

    def __init__(self, raw: BinaryIO, path: str) -> None:
        self._raw = raw
        self._make, self._error = KINDS[Path(path).suffix]()
        self._member = self._make()
        self._rest = b""
        """Compressed bytes read but not used: the next member."""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            block = self._rest or self._raw.read(BLOCK_BYTES)
            if not block:
                if not self._member.eof:
                    raise EOFError("cut off")
                return 0
            self._content = memoryview(self._decompress(block))
        n = min(len(buffer), len(self._content))
        buffer[:n] = self._content[:n]
        self._content = self._content[n:]
        return n

    def _decompress(self, block: bytes) -> bytes:
        if self._member.eof:
            self._member = self._make()
        try:
            content: bytes = self._member.decompress(block)
        except self._error as error:
            raise EOFError(f"damaged ({error})") from error
        self._rest = self._member.unused_data if self._member.eof else b""
        return content
