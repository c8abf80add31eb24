"""Read Arrow by record batches: streams, as in `datasets.save_to_disk` and the hub's cache, and Arrow's file format."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from model.texts import columns
from model.texts.record import Piece, Read, group

SUFFIXES = (".arrow",)
_MAGIC = b"ARROW1"
"""The first bytes of Arrow's file format (Feather 2); streams begin otherwise."""


class _Batches:
    """The record batches of a file in Arrow's file format, read like those of a stream."""

    def __init__(self, file: Any) -> None:
        self._file, self.schema = file, file.schema

    def __iter__(self) -> Iterator[Any]:
        return map(self._file.get_batch, range(self._file.num_record_batches))


@contextmanager
def _open(path: str) -> Iterator[Any]:
    import pyarrow as pa  # type: ignore[import-untyped]

    with columns.refusing_damage(path):
        mapped = pa.memory_map(path)
    with mapped, columns.refusing_damage(path):
        is_file = mapped.read(len(_MAGIC)) == _MAGIC
        mapped.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(mapped) as opened:
            yield _Batches(opened) if is_file else opened


def split(path: str, piece_bytes: int) -> list[Piece]:
    with _open(path) as stream:
        return group(path, [columns.checked(batch).nbytes for batch in stream], piece_bytes)


def read(piece: Piece, text_column: str) -> Iterator[Read]:
    with _open(piece.path) as stream:
        name = columns.choose(stream.schema, text_column, piece.path)
        batches = [batch.select([name]) for i, batch in enumerate(stream) if piece.begin <= i < piece.end]
        # Arrow itself believes offsets, and would read beyond its memory.
        checked = (columns.checked(batch, fully=True) for batch in batches)
        yield from columns.read(piece, name, checked, sum(batch.num_rows for batch in batches))


def place(piece: Piece, row: int) -> str:
    with _open(piece.path) as stream:
        before = sum(batch.num_rows for i, batch in enumerate(stream) if i < piece.begin)
    return f"{piece.path}:row {before + row}"
