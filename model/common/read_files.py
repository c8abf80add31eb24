"""Read files of checkpoints without trusting their sizes and links."""

import codecs
import difflib
import json
import os
import stat
from pathlib import Path
from typing import Any

from model.common.errors import CheckpointError

CONFIG_BYTES = 100_000_000
"""Size limit of config.json, an index or another JSON file, which are read whole. Real ones have up to about 10 MB."""
TOKENIZER_BYTES = 1_000_000_000
"""Size limit of tokenizer.json and vocabularies, which are read whole. Real ones have up to about 40 MB."""
MAX_LEVELS = 64
"""Largest depth of folders in a folder that is read with its subfolders."""
LFS_POINTER = b"version https://git-lfs"
"""Start of the file that a clone without git-lfs has in the place of a large file."""


def similar_path(path: Path) -> Path | None:
    """Return the neighbour of a missing path with the most similar name, as a suggestion; None if none is similar."""
    if not os.access(path.parent, os.R_OK | os.X_OK) or not path.parent.is_dir():
        return None
    names = difflib.get_close_matches(path.name, [neighbour.name for neighbour in path.parent.iterdir()], n=1)
    return path.parent / names[0] if names else None


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
    return _starts_with(path, codecs.BOM_UTF8)


def is_lfs_pointer(path: Path) -> bool:
    return _starts_with(path, LFS_POINTER)


def _starts_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def read_json(path: Path) -> Any:
    """Return the value of a small JSON file. Raises CheckpointError if it is above CONFIG_BYTES or not JSON."""
    text = read_bytes_up_to(path, CONFIG_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error


def leads_outside(path: Path, folder: Path) -> bool:
    """Return whether `path`, in `folder` or below it, is a symlink to a place outside the folder.

    A snapshot in the Hugging Face cache (`models--X--Y/snapshots/REVISION`) and its subfolders consist of links into
    the `blobs` folder of the model; those count as inside.
    """
    home, target = folder.resolve(), path.resolve()
    if target.is_relative_to(home):
        return False
    models = (p.parent.parent for p in (home, *home.parents) if p.parent.name == "snapshots")
    return not any(model.name.startswith("models--") and target.is_relative_to(model / "blobs") for model in models)


def refuse_outside(path: Path, folder: Path) -> None:
    """Raise CheckpointError if `path`, whose content is copied, is a symlink out of `folder`."""
    if leads_outside(path, folder):
        raise CheckpointError(
            f"{path} is a symlink out of its folder, to {path.resolve()}; files for the output must lie in "
            "the folder itself: copy the file there."
        )
