"""Units: what is tokenised in one go, becomes one shard of the cache, and need not be done again after a kill.

How sources are divided follows from their files alone, never from the number of workers or machines.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from uptrain.data.prepare.sources import Source
from uptrain.data.readers import Piece, find_reader

UNIT_BYTES = 64 << 20
MAX_UNITS = 4096
"""Very much data is divided into larger units, so that a cache keeps to a number of files that can all be mapped."""


@dataclass(frozen=True)
class Unit:
    """Pieces of one source: a part of a large file, or several small files."""

    number: int
    """Its place in the order of all units of all sources, and its shard's number."""
    source: int
    """Which source it is of."""
    format: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def identity(self) -> list[Any]:
        """Return what tells whether the same bytes are still there: paths, sizes, times; and the pieces' borders."""
        return [[*file_identity(piece.path), piece.begin, piece.end] for piece in self.pieces]


@dataclass(frozen=True)
class UnitRecord:
    """What came of a unit."""

    identity: list[Any]
    n_tokens: int
    n_documents: int
    n_records: int
    dropped: dict[str, int]
    """Records that are no document, by reason; not those that were skipped."""
    skipped: int
    """Bad records."""
    first_bad: str
    """Place and reason of the first of them, or empty."""
    tokens_sha256: str
    documents_sha256: str


def file_identity(path: str) -> list[Any]:
    """Return a file's full path, size in bytes, and time of change in nanoseconds."""
    stat = Path(path).stat()
    return [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]  # noqa: PTH100 (resolving links would cost a lot)


def check_unchanged(unit: Unit, identity: list[Any]) -> None:
    """Raise InputError if a file of the unit is not what it was."""
    for piece, before in zip(unit.pieces, identity, strict=True):
        if not Path(piece.path).exists() or file_identity(piece.path) != before[:3]:
            raise InputError(f"{piece.path} changed while it was read; start again when it is at rest.")


def make_units(sources: list[Source]) -> list[Unit]:
    """Divide the sources. Raises InputError for a file that cannot be opened as what its name says."""
    total = sum(Path(file).stat().st_size for source in sources for file in source.files)
    unit_bytes = max(UNIT_BYTES, total // MAX_UNITS)
    groups = [
        (number, source.format, group)
        for number, source in enumerate(sources)
        for group in _group(_pieces(source, unit_bytes), unit_bytes)
    ]
    return [Unit(i, number, name, tuple(group)) for i, (number, name, group) in enumerate(groups)]


def _pieces(source: Source, unit_bytes: int) -> list[Piece]:
    reader = find_reader(source.format)
    return [piece for file in source.files for piece in reader.split(file, unit_bytes)]


def _group(pieces: list[Piece], unit_bytes: int) -> list[list[Piece]]:
    """Put neighbours together while they stay within `unit_bytes`."""
    groups: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not groups or size + piece.nbytes > unit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    return groups
