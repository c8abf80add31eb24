"""Define the interface of readers: the pieces of a file, and records as documents or Problems."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from model.common.checks import short_repr

TOKEN_IDS = "input_ids"
"""Column of tokenised records, as Hugging Face datasets name it."""
MASK, LABELS = "attention_mask", "labels"
"""Columns beside it, if there are any: 0 where the ids are padding, and the ids to predict, or −100."""

OR_NAME_IT = ", or name it with `uptrain prepare --text-column`"
"""End of the advice on a record without a text, for commands that take such an option."""

Integers = npt.NDArray[np.int64]


class Problem(NamedTuple):
    """Reason why a record has no document."""

    reason: str
    bad: bool = True
    """Whether the record is an error; otherwise it is dropped and counted by its reason."""


NULL, EMPTY, BLANK = Problem("null", bad=False), Problem("empty", bad=False), Problem("blank lines", bad=False)

Document = str | Integers
"""A text, or its token ids."""


class OtherLabels(np.ndarray):
    """Token ids of a record whose labels are others, such as −100 for a prompt. All of them are trained on."""


class Record(NamedTuple):
    """One record of a piece."""

    row: int
    """Number of the record within the piece, from 1."""
    bytes_read: int
    """Bytes of the piece read so far, for progress; may be approximate."""
    content: Document | Problem


@dataclass(frozen=True)
class Piece:
    """File or part of a file that one worker reads at once."""

    path: str
    begin: int
    end: int
    """`begin` to `end`: range of bytes, row groups or record batches, depending on the reader."""
    nbytes: int


class Reader(Protocol):
    """Interface of a module that reads one kind of file: `arrow`, `jsonl`, `parquet` and `txt`."""

    SUFFIXES: tuple[str, ...]

    def split(self, path: str, piece_bytes: int) -> list[Piece]:
        """Divide a file into pieces of about this size, in order. Raises InputError if it cannot be opened."""

    def read(self, piece: Piece, text_column: str) -> Iterator[Record]:
        """Yield the records of a piece. Raises InputError if the file is damaged, and not only a record."""

    def place(self, piece: Piece, row: int) -> str:
        """Return the position of a record for messages, such as `file:line`."""


def kind_of(value: Any) -> str:
    """Return the JSON type of a value in words."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names[type(value)]


NO_IDS = f"field {TOKEN_IDS!r} is not a list of whole numbers"


def token_ids(value: Any) -> Document | Problem:
    """Return a list of token ids as an array, or its Problem."""
    if value is None:
        return NULL
    if value == []:
        return EMPTY
    ids = _integers(value)
    return Problem(NO_IDS) if ids is None else ids


def _integers(value: Any, or_booleans: bool = False) -> Integers | None:
    """Return a list of whole numbers, or also of true and false, as an array; None for anything else."""
    kinds = (int, bool) if or_booleans else (int,)
    # Of strings, numpy would make an array as wide as the longest.
    if not isinstance(value, list) or any(type(number) not in kinds for number in value):
        return None
    try:
        return np.asarray(value, dtype=np.int64)
    except OverflowError:
        return None


def without_padding(ids: Integers, mask: Integers | None, labels: Integers | None) -> Document | Problem:
    """Return token ids without those at either end that the mask, 0 or 1 for each, marks as padding.

    The result is a Problem for another mask. If the labels differ, it is OtherLabels.
    """
    begin, end = 0, len(ids)
    if mask is not None:
        if len(mask) != len(ids):
            return Problem(f"{MASK!r} has {len(mask):,} numbers, and {TOKEN_IDS!r} has {len(ids):,}")
        if ((mask != 0) & (mask != 1)).any():
            return Problem(f"{MASK!r} holds other numbers than 0 and 1")
        ones = np.flatnonzero(mask)
        if not len(ones):
            return EMPTY
        begin, end = int(ones[0]), int(ones[-1]) + 1
        if end - begin != len(ones):
            zero = begin + int(mask[begin:end].argmin())
            return Problem(f"{MASK!r} is 0 at position {zero}, between ones; only padding at the ends can be left out")
    kept = ids[begin:end]
    if labels is None or (len(labels) == len(ids) and np.array_equal(labels[begin:end], kept)):
        return kept
    return kept.view(OtherLabels)


def _masked(record: dict[str, Any]) -> Document | Problem:
    ids = token_ids(record[TOKEN_IDS])
    if not isinstance(ids, np.ndarray) or not (MASK in record or LABELS in record):
        return ids
    mask, labels = (_integers(record.get(name), or_booleans=True) for name in (MASK, LABELS))
    if mask is None and record.get(MASK) is not None:
        return Problem(f"field {MASK!r} is not a list of 0 and 1")
    return without_padding(ids, mask, labels)


def document(record: Any, text_column: str) -> Document | Problem:
    """Return the document of a JSON record: its text, otherwise its token ids."""
    if not isinstance(record, dict):
        return Problem(f"{kind_of(record)} instead of an object")
    if text_column in record:
        text = record[text_column]
        if isinstance(text, str):
            return text or EMPTY
        return NULL if text is None else Problem(f"field {text_column!r} is {kind_of(text)}, not a string{_chat(text)}")
    if TOKEN_IDS in record:
        return _masked(record)
    chat = next((advice for value in record.values() if (advice := _chat(value))), None)
    return Problem(
        f"no field {text_column!r} among {some(list(record))}"
        + (chat or f"; rename the field of the text to {text_column!r}{OR_NAME_IT}")
    )


def _chat(value: Any) -> str:
    """Return advice on a field that holds the messages of a chat; "" for any other."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return ""
    return (
        "; a chat must become text first: write what the tokenizer's apply_chat_template(messages, tokenize=False) "
        "returns to the field 'text' (docs/training.md, \"Chat models\")"
    )


def some(names: list[str]) -> str:
    """Return the first six names as a list for messages."""
    shown = ", ".join(map(short_repr, names[:6])) or "no fields"
    return f"{shown}, …" if len(names) > 6 else shown


def group(path: str, sizes: list[int], piece_bytes: int) -> list[Piece]:
    """Combine consecutive parts of a file, with these sizes in bytes, into pieces of about `piece_bytes`."""
    pieces, begin, nbytes = [], 0, 0
    for end, size in enumerate(sizes, 1):
        nbytes += size
        if nbytes >= piece_bytes or end == len(sizes):
            pieces.append(Piece(path, begin, end, nbytes))
            begin, nbytes = end, 0
    return pieces
