"""Find and read texts (files, folders, datasets), for all programs.

`sources` finds the files that a name stands for, `jsonl`, `parquet`, `txt` and `arrow` read them. A new format needs a
module with the interface `Reader` and its name in `READERS`.
"""

import importlib
from typing import cast

from model.texts.record import Document, Piece, Problem, Reader, Record

READERS = ("jsonl", "parquet", "txt", "arrow")
NEED_PYARROW = ("parquet", "arrow")

__all__ = ["READERS", "Document", "Piece", "Problem", "Reader", "Record", "find_reader", "format_of"]


def find_reader(name: str) -> Reader:
    return cast(Reader, importlib.import_module(f"model.texts.{name}"))


def format_of(file_name: str) -> str | None:
    """Return the format of a file by the suffix of its name; None if unknown."""
    plain_first = sorted(READERS, key=NEED_PYARROW.__contains__)
    return next((name for name in plain_first if file_name.lower().endswith(find_reader(name).SUFFIXES)), None)
