"""Read documents from Arrow columns, for parquet files and folders of `save_to_disk`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from model.common.errors import InputError
from model.texts.record import (
    EMPTY,
    LABELS,
    MASK,
    NULL,
    TOKEN_IDS,
    Document,
    Piece,
    Problem,
    Record,
    some,
    without_padding,
)

_SLICE_BYTES = 4 << 20


@contextmanager
def refusing_damage(path: str) -> Iterator[None]:
    """Raise InputError in place of Arrow's errors about a file. Lack of memory and errors of the disk pass."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one for names of columns
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise InputError(
            f"{path} is damaged or cut off ({str(error).splitlines()[0]}); fetch the file again."
        ) from error


def choose(schema: Any, text_column: str, path: str) -> list[str]:
    """Return the name of the text column, or of the columns of token ids, their mask and their labels.

    Raises InputError if neither text nor ids are usable. Labels that are not lists are of whole records, and left out.
    """
    for name in (text_column,) if text_column in schema.names else (text_column, TOKEN_IDS, MASK, LABELS):
        if schema.names.count(name) > 1:
            raise InputError(f"{path} has {schema.names.count(name)} columns {name!r}; rename all but one.")
    if text_column in schema.names:
        type_ = schema.field(text_column).type
        if not _is_text(type_):
            raise InputError(
                f"{path}: column {text_column!r} is {type_}, not text; save it as strings, or name another "
                "column (`uptrain prepare` takes --text-column)."
            )
        return [text_column]
    if TOKEN_IDS not in schema.names:
        raise InputError(
            f"{path}: no column {text_column!r} among {some(schema.names)}; rename the column of the text to it "
            "(`uptrain prepare` takes --text-column)."
        )
    type_ = schema.field(TOKEN_IDS).type
    if not _is_list_of_integers(type_):
        raise InputError(f"{path}: column {TOKEN_IDS!r} is {type_}, not lists of whole numbers.")
    names = [TOKEN_IDS]
    if MASK in schema.names:
        type_ = schema.field(MASK).type
        if not _is_list_of_integers(type_, or_booleans=True):
            raise InputError(f"{path}: column {MASK!r} is {type_}, not lists of 0 and 1.")
        names.append(MASK)
    if LABELS in schema.names and _is_list_of_integers(schema.field(LABELS).type):
        names.append(LABELS)
    return names


def _is_text(type_: Any) -> bool:
    if pa.types.is_dictionary(type_):  # as pandas saves categories
        type_ = type_.value_type
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def _is_list_of_integers(type_: Any, or_booleans: bool = False) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(type_) for is_kind in kinds):
        return False
    return bool(pa.types.is_integer(type_.value_type) or (or_booleans and pa.types.is_boolean(type_.value_type)))


def read(piece: Piece, names: list[str], batches: Iterator[Any], n_rows: int) -> Iterator[Record]:
    """Yield the records of a piece's batches from the columns that `choose` named."""
    row = 0
    with refusing_damage(piece.path):
        for batch in batches:
            for document in documents(batch.column(names[0])) if len(names) == 1 else _masked(batch, names):
                row += 1
                yield Record(row, piece.nbytes * row // n_rows, document)


def _masked(batch: Any, names: list[str]) -> Iterator[Document | Problem]:
    """Yield the documents of a batch of token ids with a mask or labels."""
    for row, ids in enumerate(documents(batch.column(TOKEN_IDS))):
        if not isinstance(ids, np.ndarray):
            yield ids
            continue
        beside = {name: _token_ids(batch.column(name)[row], name) for name in names[1:]}
        bad = next((value for value in beside.values() if isinstance(value, Problem) and value.bad), None)
        arrays = {name: value for name, value in beside.items() if isinstance(value, np.ndarray)}
        empty = np.empty(0, np.int64)
        mask, labels = (empty if beside.get(name) is EMPTY else arrays.get(name) for name in (MASK, LABELS))
        yield bad or without_padding(ids, mask, labels)


def checked(batch: Any) -> Any:
    """Return a record batch if its buffers are as long as its columns need. Raises ArrowInvalid if not.

    No offset or index may lead out of its memory. Invalid UTF-8 is no error here: it is a problem of its document
    alone.
    """
    batch.validate()
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            _check_indices(column)
            column = column.dictionary
        (column.view(_bytes_of(column.type)) if _is_text(column.type) else column).validate(full=True)
    return batch


def _check_indices(column: Any) -> None:
    column.indices.validate(full=True)
    if len(column) > column.null_count:
        ends = pc.min_max(column.indices)
        if ends["min"].as_py() < 0 or ends["max"].as_py() >= len(column.dictionary):
            raise pa.ArrowInvalid("an index beyond the dictionary")


def _bytes_of(text: Any) -> Any:
    """Return the type of the same values, not taken for UTF-8."""
    if pa.types.is_string(text):
        return pa.binary()
    return pa.large_binary() if pa.types.is_large_string(text) else pa.binary_view()


def documents(column: Any) -> Iterator[Document | Problem]:
    """Yield the documents of a column of texts or of lists of token ids."""
    if not _is_text(column.type):
        yield from (_token_ids(value) for value in column)
        return
    for text in _texts(column):
        yield NULL if text is None else text or EMPTY


def _texts(column: Any) -> Iterator[str | Problem | None]:
    """Yield the texts of a column. Texts that many rows may share, which memory holds once, are made one at a time."""
    if pa.types.is_dictionary(column.type) or pa.types.is_string_view(column.type):
        yield from (_text(value) for value in column)
        return
    for part in _slices(column):
        try:
            yield from part.to_pylist()
        except UnicodeDecodeError:
            yield from [_text(value) for value in part]


def _slices(column: Any) -> Iterator[Any]:
    """Yield a column in parts of about _SLICE_BYTES: a batch may be a whole table, and Python has its texts again."""
    n_rows = max(1, _SLICE_BYTES * len(column) // max(column.nbytes, 1))
    return (column.slice(start, n_rows) for start in range(0, len(column), n_rows))


def _text(value: Any) -> str | Problem | None:
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as error:
        return Problem(f"not valid UTF-8 at byte {error.start + 1} of the text")
    return text


def _token_ids(value: Any, name: str = TOKEN_IDS) -> Document | Problem:
    if not value.is_valid:
        return NULL
    if value.values.null_count:
        return Problem(f"nulls among the numbers of {name!r}")
    ids = value.values.to_numpy(zero_copy_only=False)
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
        return Problem(f"the number {ids.max()} in {name!r}, which is no token id")
    return ids.astype(np.int64, copy=False) if ids.size else EMPTY
