"""What readers give: records as documents or as what is wrong with them, and the pieces files are read in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

TOKEN_IDS = "input_ids"
"""The column of records that are tokenised already, as Hugging Face datasets name it."""

Integers = npt.NDArray[np.int64]


class Problem(NamedTuple):
    """A record that is no document."""

    reason: str
    bad: bool = True
    """Whether that is a mistake; if not, the record is dropped, and counted by its reason."""


NULL, EMPTY, BLANK = Problem("null", bad=False), Problem("empty", bad=False), Problem("blank lines", bad=False)

Document = str | Integers | Problem


class Read(NamedTuple):
    """One record of a piece."""

    row: int
    """Its number within the piece, from 1."""
    bytes_read: int
    """How many bytes of the piece lie behind it, for progress: exact or nearly."""
    document: Document


@dataclass(frozen=True)
class Piece:
    """What one worker reads in one go: a file, or a part of one."""

    path: str
    begin: int
    end: int
    """`begin` to `end`: bytes, row groups or record batches, as the reader counts."""
    nbytes: int


class Reader(Protocol):
    """What each module of this folder offers."""

    SUFFIXES: tuple[str, ...]

    def split(self, path: str, piece_bytes: int) -> list[Piece]:
        """Divide a file into pieces of about this size, in order. Raises InputError where it cannot be opened."""

    def read(self, piece: Piece, text_column: str) -> Iterator[Read]:
        """Yield the records of a piece. Raises InputError if the file, not just a record, is damaged."""

    def place(self, piece: Piece, row: int) -> str:
        """Say where a record lies, for people: `file:line`, or what comes closest."""


def kind_of(value: Any) -> str:
    """Name the JSON type of a value."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names[type(value)]


def token_ids(value: Any) -> Document:
    """Return a list of token ids as an array, or what is wrong with it."""
    if value is None:
        return NULL
    try:
        ids = np.asarray(value) if isinstance(value, list) else None
    except ValueError:  # lists of different lengths within
        ids = None
    if ids is not None and ids.size == 0:
        return EMPTY
    if ids is None or ids.ndim != 1 or ids.dtype.kind != "i":
        return Problem(f"field {TOKEN_IDS!r} is not a list of whole numbers")
    return ids.astype(np.int64, copy=False)


def document(record: Any, text_column: str) -> Document:
    """Return the document of a record read from JSON: its text, else its token ids."""
    if not isinstance(record, dict):
        return Problem(f"{kind_of(record)} instead of an object")
    if text_column in record:
        text = record[text_column]
        if isinstance(text, str):
            return text or EMPTY
        return NULL if text is None else Problem(f"field {text_column!r} is {kind_of(text)}, not a string")
    if TOKEN_IDS in record:
        return token_ids(record[TOKEN_IDS])
    return Problem(f"no field {text_column!r} among {some(list(record))}; --text-column names another")


def some(names: list[str]) -> str:
    """List the first few names."""
    shown = ", ".join(repr(name) for name in names[:6]) or "no fields"
    return f"{shown}, …" if len(names) > 6 else shown


def group(path: str, sizes: list[int], piece_bytes: int) -> list[Piece]:
    """Make pieces of about `piece_bytes` from a file's parts, which have these sizes."""
    pieces, begin, nbytes = [], 0, 0
    for end, size in enumerate(sizes, 1):
        nbytes += size
        if nbytes >= piece_bytes or end == len(sizes):
            pieces.append(Piece(path, begin, end, nbytes))
            begin, nbytes = end, 0
    return pieces
