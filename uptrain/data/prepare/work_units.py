"""Divide sources into work units. Each is tokenised at once, becomes one cache shard, and survives a kill.

The division depends on the files only, never on the number of workers or machines.
"""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from model.texts import Piece, find_reader
from uptrain.data.prepare.sources import Source

UNIT_BYTES = 64 << 20
MAX_UNITS = 4096
"""Number of units of large data, within a factor of about two: they get larger units, so that all cache shards can be
mapped into memory."""


@dataclass(frozen=True)
class Unit:
    """Work unit: pieces of one source, which are part of a large file or several small files."""

    number: int
    """Index of the unit among those of all sources, and number of its cache shard."""
    source: int
    """Index of its source."""
    format: str
    pieces: tuple[Piece, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def fingerprint(self) -> list[Any]:
        """Return paths, sizes, modification times and ranges of the pieces, which detect changed files."""
        return [[*file_fingerprint(piece.path), piece.begin, piece.end] for piece in self.pieces]


@dataclass(frozen=True)
class UnitRecord:
    """Record of a finished unit."""

    identity: list[Any]
    """The unit's fingerprint, under the key that it has in the journal."""
    n_tokens: int
    n_documents: int
    n_records: int
    dropped: dict[str, int]
    """Numbers of records without a document, by reason; does not include skipped ones."""
    skipped: int
    """Number of bad records."""
    first_bad: str
    """Position and reason of the first bad record; empty if there is none."""
    tokens_sha256: str
    documents_sha256: str
    other_labels: int = 0
    """Number of documents whose labels were others than their ids."""
    piece_tokens: list[int] = field(default_factory=list)
    """Number of tokens of each piece."""

    @property
    def fingerprint(self) -> list[Any]:
        """The fingerprint that the unit had when it was read."""
        return self.identity


def file_fingerprint(path: str) -> list[Any]:
    """Return a file's absolute path, size in bytes, and modification time in nanoseconds."""
    stat = Path(path).stat()
    return [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]  # noqa: PTH100 (resolving links is slow)


def check_unchanged(unit: Unit, fingerprint: list[Any]) -> None:
    """Raise InputError if a file of the unit has changed."""
    for piece, before in zip(unit.pieces, fingerprint, strict=True):
        if not Path(piece.path).exists() or file_fingerprint(piece.path) != before[:3]:
            raise InputError(f"{piece.path} changed while it was read; run the same command when nothing writes to it.")


def make_units(sources: list[Source]) -> list[Unit]:
    """Divide the sources into units. Raises InputError for a file that is not of the format of its suffix."""
    total = sum(Path(file).stat().st_size for source in sources for file in source.text.files)
    unit_bytes = max(UNIT_BYTES, total // MAX_UNITS)
    units: list[Unit] = []
    for i, source in enumerate(sources):
        reader = find_reader(source.text.format)
        pieces = [piece for file in source.text.files for piece in reader.split(file, unit_bytes)]
        for group in _group(pieces, unit_bytes):
            units.append(Unit(len(units), i, source.text.format, tuple(group)))
    return units


def _group(pieces: list[Piece], unit_bytes: int) -> list[list[Piece]]:
    """Group consecutive pieces up to `unit_bytes`."""
    groups: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not groups or size + piece.nbytes > unit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    return groups
