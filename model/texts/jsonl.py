"""Read JSON Lines, one object per line: plain, gzip, xz or zstd. Lines end with LF or CRLF; a BOM is skipped.

Many corpora call such files .json (C4, Dolma) or .ndjson. A .json file may also be an array, or one object over several
lines: both are refused by the first bytes of the file. We parse line by line ourselves, since libraries stop at a bad
line without its number.
"""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from model.files.read import BOM, MAX_CONTAINERS, has_more_containers
from model.texts import compressed
from model.texts.record import BLANK, Document, Piece, Problem, Record, document

SUFFIXES = tuple(
    f"{suffix}{packed}" for suffix in (".jsonl", ".ndjson", ".json") for packed in ("", *compressed.SUFFIXES)
)
BUFFER_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
"""Bytes at the beginning of a file that tell JSON Lines from other JSON."""
_OVER_LINES = re.compile(rb'\{(?:[^\n]*[{\[,:])?[ \t\r]*\n(?:\s*["}\]\-0-9]|[ \t]+[{\[])')
"""A line that ends within an object, and a next one that goes on with it, since no record begins so."""
_ENDED_BY_CR = re.compile(rb"\}[ \t]*\r\s*\{")
"""Two records, as old Macs wrote them."""
_RECORDS = re.compile(rb"\{[^\n]*\}[ \t\r]*\n\s*\{|\[\s*\{")
"""Two lines that begin and end as records, or an array of objects."""


def split(path: str, piece_bytes: int) -> list[Piece]:
    """Divide a plain file by bytes; a line belongs to the piece in which it begins. A compressed file is one piece.

    Raises InputError for a file that begins as JSON of another form: an array, or an object over several lines.
    """
    _check_head(path)
    size = Path(path).stat().st_size
    if compressed.is_compressed(path):
        return [Piece(path, 0, size, size)]
    begins = range(0, max(size, 1), piece_bytes)
    return [Piece(path, begin, min(begin + piece_bytes, size), min(piece_bytes, size - begin)) for begin in begins]


def read(piece: Piece, text_column: str) -> Iterator[Record]:
    lines = compressed.lines(piece.path) if compressed.is_compressed(piece.path) else _plain_lines(piece)
    for row, (bytes_read, line) in enumerate(lines, 1):
        if row == 1 and piece.begin == 0:
            line = line.removeprefix(BOM)
        yield Record(row, bytes_read, parse(line, text_column))


def place(piece: Piece, row: int) -> str:
    return f"{piece.path}:{_lines_before(piece) + row}"


def holds_records(path: str) -> bool:
    """Return whether a plain file begins as several records do, and not as a config or other single object.

    An array of records counts, so that it is refused and not left out.
    """
    head = _head(path)
    if head.startswith(b"{") and b"\n" not in head.rstrip():  # the first line may be long
        head = _first_lines(path)
    return _RECORDS.match(head) is not None


def _head(path: str) -> bytes:
    with compressed.open_file(path) as file, suppress(EOFError):  # which `read` reports, if it comes so far
        return file.read(HEAD_BYTES).removeprefix(BOM).lstrip()
    return b""


def _first_lines(path: str) -> bytes:
    """Return the first line of a file, which may be long, and the beginning of the next."""
    with compressed.open_file(path) as file, suppress(EOFError):
        line = file.readline(compressed.MAX_LINE_BYTES + 1)
        return (line + file.read(HEAD_BYTES)).removeprefix(BOM).lstrip()
    return b""


def _check_head(path: str) -> None:
    head = _head(path)
    if head.startswith(b"["):
        form, query = "a JSON array", ".[]"
    elif _OVER_LINES.match(head):
        form, query = "JSON with an object over several lines", "."
    else:
        return
    file, unpack = shlex.quote(path), compressed.COMMANDS.get(Path(path).suffix.lower())
    command = f"{unpack} {file} | jq -c {query!r}" if unpack else f"jq -c {query!r} {file}"
    raise InputError(f"{path} is {form}; write one object per line: {command}")


def _plain_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    with Path(piece.path).open("rb", buffering=BUFFER_BYTES) as file:
        position, row = _seek_to_first_line(file, piece), 0
        while position < piece.end:
            line, row = file.readline(compressed.MAX_LINE_BYTES + 1), row + 1
            if len(line) > compressed.MAX_LINE_BYTES:
                compressed.refuse_long_line(piece.path, _lines_before(piece) + row)
            position += len(line)
            if not line:  # the file was truncated, which `check_unchanged` detects
                return
            yield position - piece.begin, line


def _seek_to_first_line(file: Any, piece: Piece) -> int:
    """Seek to the first line that begins in the piece; return its offset."""
    if piece.begin:
        file.seek(piece.begin - 1)
        while (line := file.readline(BUFFER_BYTES)) and not line.endswith(b"\n"):
            if file.tell() >= piece.end:  # the piece lies within a line that begins before it
                break
    return int(file.tell())


def _lines_before(piece: Piece) -> int:
    """Count the lines before a piece. Only error messages need it."""
    with Path(piece.path).open("rb", buffering=BUFFER_BYTES) as file:
        left, count = _seek_to_first_line(file, piece), 0
        file.seek(0)
        while left > 0:
            block = file.read(min(left, BUFFER_BYTES))
            count, left = count + block.count(b"\n"), left - len(block)
    return count


def parse(line: bytes, text_column: str) -> Document | Problem:
    """Return the document of one line, or its Problem."""
    if not line.strip():
        return BLANK
    if has_more_containers(line, MAX_CONTAINERS):
        return Problem(f"more than {MAX_CONTAINERS:,} objects and lists in one record")
    try:
        parsed = document(json.loads(line.rstrip(b"\r\n").decode()), text_column)
        if isinstance(parsed, str) and b"\\u" in line:
            parsed.encode()
    except UnicodeDecodeError as error:
        return Problem(f"not valid UTF-8 at byte {error.start + 1} of the line")
    except UnicodeEncodeError as error:
        return Problem(f"half of a surrogate pair in field {text_column!r} at character {error.start + 1}")
    except RecursionError:
        return Problem("not valid JSON: nested too deeply")
    except ValueError as error:
        return Problem(_json_problem(line, error))
    return parsed


def _json_problem(line: bytes, error: ValueError) -> str:
    detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    if b"\0" in line:
        return f"not valid JSON: the line holds NUL bytes, the first at byte {line.index(0) + 1}"
    if _ENDED_BY_CR.search(line):
        return f"not valid JSON: lines end with a carriage return alone; end them with LF or CRLF ({detail})"
    if not line.endswith(b"\n"):
        return f"not valid JSON: the last line is cut off ({detail})"
    return f"not valid JSON ({detail})"
