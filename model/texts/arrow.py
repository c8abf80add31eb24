"""Read Arrow streams by record batches: the files of `datasets.save_to_disk` and of the hub's cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from model.texts import columns
from model.texts.record import Piece, Read, group

SUFFIXES = (".arrow",)


@contextmanager
def _open(path: str) -> Iterator[Any]:
    import pyarrow as pa  # type: ignore[import-untyped]

    with columns.refusing_damage(path):
        mapped = pa.memory_map(path)
    with mapped, columns.refusing_damage(path), pa.ipc.open_stream(mapped) as stream:
        yield stream


def split(path: str, piece_bytes: int) -> list[Piece]:
    with _open(path) as stream:
        return group(path, [batch.nbytes for batch in stream], piece_bytes)


def read(piece: Piece, text_column: str) -> Iterator[Read]:
    with _open(piece.path) as stream:
        name = columns.choose(stream.schema, text_column, piece.path)
        batches = [batch.select([name]) for i, batch in enumerate(stream) if piece.begin <= i < piece.end]
        yield from columns.read(piece, name, iter(batches), sum(batch.num_rows for batch in batches))


def place(piece: Piece, row: int) -> str:
    with _open(piece.path) as stream:
        before = sum(batch.num_rows for i, batch in enumerate(stream) if i < piece.begin)
    return f"{piece.path}:row {before + row}"
