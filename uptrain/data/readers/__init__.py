"""Source files, one format a file. A new one: a module here with the `Reader` interface, and its name in `READERS`."""

import importlib
from typing import cast

from uptrain.data.readers.record import Document, Piece, Problem, Read, Reader

READERS = ("jsonl", "parquet", "txt", "arrow")

__all__ = ["READERS", "Document", "Piece", "Problem", "Read", "Reader", "find_reader", "format_of"]


def find_reader(name: str) -> Reader:
    return cast(Reader, importlib.import_module(f"uptrain.data.readers.{name}"))


def format_of(file_name: str) -> str | None:
    """Return the format that a file's name says, or None."""
    return next((name for name in READERS if file_name.endswith(find_reader(name).SUFFIXES)), None)
