"""Read Parquet files by row groups."""

from collections.abc import Iterator, Sequence
from typing import Any

from model.texts import columns
from model.texts.record import Piece, Record, group

SUFFIXES = (".parquet",)
BATCH_ROWS, BATCH_BYTES = 1024, 16 << 20
"""Largest number of rows, and of bytes about, that are read at once."""


def _open(path: str, encoded: Sequence[str] = ()) -> Any:
    """Open a file. A column in `encoded` is read as a dictionary."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    with columns.refusing_damage(path):
        return pyarrow.parquet.ParquetFile(path, read_dictionary=list(encoded))


def split(path: str, piece_bytes: int) -> list[Piece]:
    with _open(path) as file:
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    return group(path, sizes, piece_bytes)


def read(piece: Piece, text_column: str) -> Iterator[Record]:
    with _open(piece.path) as file:
        groups = range(piece.begin, piece.end)
        n_rows = sum(file.metadata.row_group(i).num_rows for i in groups)
        n_bytes = sum(file.metadata.row_group(i).total_byte_size for i in groups)
        batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES * n_rows // max(n_bytes, 1)))
        with columns.refusing_damage(piece.path):
            names = columns.choose(file.schema_arrow, text_column, piece.path)
    # A value that is repeated is stored once. As texts, a batch of it would be a thousand times as large.
    with _open(piece.path, names[:1] if names[0] == text_column else ()) as file:
        batches = file.iter_batches(batch_rows, row_groups=list(groups), columns=names)
        yield from columns.read(piece, names, batches, n_rows)


def place(piece: Piece, row: int) -> str:
    with _open(piece.path) as file:
        before = sum(file.metadata.row_group(i).num_rows for i in range(piece.begin))
    return f"{piece.path}:row {before + row}"
