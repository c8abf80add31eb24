"""Read Arrow by record batches: streams, as in `datasets.save_to_disk` and the hub's cache, and Arrow's file format."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from model.texts import columns
from model.texts.record import Piece, Record, group

SUFFIXES = (".arrow",)
_MAGIC = b"ARROW1"
"""The first bytes of Arrow's file format (Feather 2); streams begin otherwise."""
_MAGIC_BYTES = 8
"""Bytes before the first message of the file format; the messages are those of a stream."""


class _Batches:
    """The record batches of a file in Arrow's file format, read like those of a stream."""

    def __init__(self, file: Any) -> None:
        self._file, self.schema, self.n_listed = file, file.schema, file.num_record_batches

    def __iter__(self) -> Iterator[Any]:
        return map(self._file.get_batch, range(self.n_listed))


@contextmanager
def _map(path: str) -> Iterator[tuple[Any, bool]]:
    """Map a file, and say whether it is in Arrow's file format. It is at the beginning of its first message."""
    import pyarrow as pa  # type: ignore[import-untyped]

    with columns.refusing_damage(path):
        mapped = pa.memory_map(path)
    with mapped, columns.refusing_damage(path):
        is_file = mapped.read(len(_MAGIC)) == _MAGIC
        mapped.seek(_MAGIC_BYTES if is_file else 0)
        yield mapped, is_file


@contextmanager
def _open(path: str, fields: tuple[int, ...] = ()) -> Iterator[Any]:
    """Open a file for its record batches, with some columns or all. Compressed ones are unpacked when read."""
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(included_fields=list(fields))
    with _map(path) as (mapped, is_file):
        mapped.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(mapped, options=options) as opened:
            yield _Batches(opened) if is_file else opened


def split(path: str, piece_bytes: int) -> list[Piece]:
    """Divide a file by the bytes of its batches in the file, none of which is unpacked."""
    import pyarrow as pa

    with _open(path) as opened:  # which checks more than there is to the messages
        n_listed = opened.n_listed if isinstance(opened, _Batches) else None
    with _map(path) as (mapped, _):
        messages = pa.ipc.MessageReader.open_stream(mapped)
        sizes = [message.body.size for message in messages if message.type == "record batch"]
        if n_listed not in (None, len(sizes)):
            raise pa.ArrowInvalid("its footer lists other batches than it holds")
    return group(path, sizes, piece_bytes)


def read(piece: Piece, text_column: str) -> Iterator[Record]:
    with _open(piece.path) as stream:
        names = columns.choose(stream.schema, text_column, piece.path)
        fields = tuple(map(stream.schema.names.index, names))

    def batches(stream: Any) -> Iterator[Any]:
        return (batch.select(names) for batch in islice(stream, piece.begin, piece.end))

    with _open(piece.path, fields) as stream:
        n_rows = sum(batch.num_rows for batch in batches(stream))
    with _open(piece.path, fields) as stream:
        # Arrow does not check offsets, and would read beyond its memory.
        checked = (columns.checked(batch) for batch in batches(stream))
        yield from columns.read(piece, names, checked, n_rows)


def place(piece: Piece, row: int) -> str:
    with _open(piece.path, (0,)) as stream:
        before = sum(batch.num_rows for batch in islice(stream, piece.begin))
    return f"{piece.path}:row {before + row}"
