"""Read plain text files, one document per file: plain, gzip, xz or zstd."""

from collections.abc import Iterator
from pathlib import Path

from model.common.errors import InputError
from model.texts import compressed
from model.texts.record import EMPTY, Piece, Problem, Record

SUFFIXES = (".txt", *(f".txt{suffix}" for suffix in compressed.SUFFIXES))


def split(path: str, piece_bytes: int) -> list[Piece]:
    size = Path(path).stat().st_size
    return [Piece(path, 0, size, size)]


def read(piece: Piece, text_column: str) -> Iterator[Record]:
    limit = compressed.MAX_LINE_BYTES
    try:
        with compressed.open_file(piece.path) as file:
            content = file.read(limit + 1)
    except EOFError as error:
        raise InputError(f"{piece.path}: the compressed data is {error}; fetch the file again.") from error
    if len(content) > limit:
        raise InputError(
            f"{piece.path} has more than {limit:,} bytes of text, and a .txt file is one document; divide it, or make "
            "it a .jsonl file of documents."
        )
    try:
        document = content.decode("utf-8-sig") or EMPTY
    except UnicodeDecodeError as error:
        document = Problem(f"not valid UTF-8 at byte {error.start + 1}; convert it with iconv")
    yield Record(1, piece.nbytes, document)


def place(piece: Piece, row: int) -> str:
    return piece.path
