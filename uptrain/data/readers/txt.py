"""Read plain text files, one document per file."""

from collections.abc import Iterator
from pathlib import Path

from model.common import text_files
from model.common.errors import InputError
from uptrain.data.readers.record import EMPTY, Piece, Problem, Read

SUFFIXES = (".txt",)


def split(path: str, piece_bytes: int) -> list[Piece]:
    size = Path(path).stat().st_size
    return [Piece(path, 0, size, size)]


def read(piece: Piece, text_column: str) -> Iterator[Read]:
    limit = text_files.MAX_LINE_BYTES
    if piece.nbytes > limit:
        raise InputError(
            f"{piece.path} has {piece.nbytes:,} bytes, and a .txt file is one document, of {limit:,} bytes at most; "
            "divide it, or make it a .jsonl file of documents."
        )
    try:
        document = Path(piece.path).read_bytes().decode("utf-8-sig") or EMPTY
    except UnicodeDecodeError as error:
        document = Problem(f"not valid UTF-8 at byte {error.start + 1}")
    yield Read(1, piece.nbytes, document)


def place(piece: Piece, row: int) -> str:
    return piece.path
