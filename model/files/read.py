"""Read files of checkpoints without trusting their sizes and links."""

import codecs
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.common.errors import CheckpointError

MAX_CONFIG_BYTES = 100_000_000
"""Size limit of config.json, an index or another JSON file, which are read whole. Real ones have up to about 10 MB."""
MAX_TOKENIZER_BYTES = 1_000_000_000
"""Size limit of tokenizer.json and vocabularies, which are read whole. Real ones have up to about 40 MB."""
MAX_LEVELS = 64
"""Largest depth of folders in a folder that is read with its subfolders."""
BOM = codecs.BOM_UTF8
MAX_CONTAINERS = 1_000_000
"""Largest number of objects and lists in a JSON text, unless the text is long. An empty one of 2 bytes takes 64 in
memory."""
BYTES_PER_CONTAINER = 16
"""A JSON file may have more than MAX_CONTAINERS objects and lists, if it has this many bytes for each on average.

The longest real files are safetensors headers. An entry there has an object and two lists, and about 100 bytes, so 33
for each. It has 17 even with a name of one letter and an empty shape. A container takes 56 to 250 bytes in memory, so
with this limit all containers take at most about 16 times the size of the file; short strings take as much.
"""
LFS_POINTER = b"version https://git-lfs"
"""Start of the file that a clone without git-lfs has in the place of a large file."""


def check_size(path: Path, limit: int) -> None:
    """Raise CheckpointError unless `path` is a regular file of at most `limit` bytes. The file is not opened."""
    check_regular(path)
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path} has {size:,} bytes, but at most {limit:,} are allowed; download it again.")


def check_regular(path: Path) -> None:
    """Raise CheckpointError if `path` is a folder, FIFO, socket or device; opening some of these blocks forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is not a regular file; replace it by the file itself.")


def read_bytes_up_to(path: Path, limit: int) -> bytes:
    """Return a file's content. Raises CheckpointError unless it is a regular file of at most `limit` bytes."""
    check_size(path, limit)
    with path.open("rb") as file:
        # A read of `limit` bytes would first allocate as many, which `ulimit -v` may forbid.
        return file.read(min(limit, os.fstat(file.fileno()).st_size))


def read_content(content: Path | bytes, limit: int) -> bytes:
    """Return one of a checkpoint's `side_files`: what `read_bytes_up_to` returns of a file, and bytes as they are."""
    return read_bytes_up_to(content, limit) if isinstance(content, Path) else content


def starts_with_bom(path: Path) -> bool:
    return _starts_with(path, BOM)


def refuse_bom(path: Path) -> None:
    """Raise CheckpointError if a file that transformers will read begins with a byte-order mark."""
    if starts_with_bom(path):
        raise CheckpointError(
            f"{path} begins with a byte-order mark, which transformers does not read; save it as UTF-8 without the "
            "mark."
        )


def is_lfs_pointer(path: Path) -> bool:
    return _starts_with(path, LFS_POINTER)


def _starts_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def read_json(path: Path) -> Any:
    """Return the value of a small JSON file. Raises CheckpointError if it is above MAX_CONFIG_BYTES or not JSON."""
    text = read_bytes_up_to(path, MAX_CONFIG_BYTES)
    try:
        return parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error


def parse_json(text: bytes, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text in UTF-8, which may begin with a byte-order mark.

    All JSON of checkpoints and runs is parsed here, since `json.loads` guesses among UTF-8, UTF-16 and UTF-32, and
    other programs read only UTF-8. `make_object` is `object_pairs_hook` of `json.loads`.

    Raises ValueError for another encoding, for what is no JSON or is nested too deeply, and for more objects and lists
    than MAX_CONTAINERS and BYTES_PER_CONTAINER allow.
    """
    encoding = json.detect_encoding(text)
    if not encoding.startswith("utf-8"):
        raise ValueError(f"it is in {encoding[:6].upper()}, or damaged; save it in UTF-8")
    most = max(MAX_CONTAINERS, len(text) // BYTES_PER_CONTAINER)
    if has_more_containers(text, most):
        raise ValueError(f"more than {most:,} objects and lists in {len(text):,} bytes")
    try:
        return json.loads(text.removeprefix(BOM).decode(), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"the byte at offset {error.start} is not UTF-8; save it in UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?')  # one without an end, too: it is read once


def has_more_containers(text: bytes, most: int) -> bool:
    """Return whether a JSON text has more objects and lists than `most`. Brackets in strings do not count."""
    return _n_brackets(text) > most and _n_brackets(_STRING.sub(b"", text)) > most


def _n_brackets(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")
