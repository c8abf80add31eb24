"""Readers of source files, one format per module. A new format needs a module with the interface `Reader` and its name
in `READERS`.
"""

import importlib
from typing import cast

from uptrain.data.readers.record import Document, Piece, Problem, Read, Reader

READERS = ("jsonl", "parquet", "txt", "arrow")

__all__ = ["READERS", "Document", "Piece", "Problem", "Read", "Reader", "find_reader", "format_of"]


def find_reader(name: str) -> Reader:
    return cast(Reader, importlib.import_module(f"uptrain.data.readers.{name}"))


def format_of(file_name: str) -> str | None:
    """Return the format of a file by the suffix of its name; None if unknown."""
    return next((name for name in READERS if file_name.endswith(find_reader(name).SUFFIXES)), None)
