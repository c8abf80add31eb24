"""Check paths: their names, where they lie, and where links lead."""

import difflib
import os
from contextlib import suppress
from pathlib import Path

from model.common.errors import CheckpointError, InputError

MAX_NAME = 255
"""Largest number of bytes in a file name on Linux and macOS file systems."""


def check_name(path: Path, what: str, longest: int = MAX_NAME) -> None:
    """Raise InputError if a path is not UTF-8, which JSON requires, or its last part has more than `longest` bytes."""
    shown = os.fsencode(path).decode(errors="backslashreplace")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} ({shown}) has a name that is not UTF-8; rename it.") from error
    if len(os.fsencode(path.name)) > longest:
        raise InputError(f"{what} ({shown}) has a name of more than {longest} bytes; choose a shorter one.")


def is_plain_name(name: str) -> bool:
    """Return whether a name can be that of a file directly in a folder: not a path, in UTF-8, not too long."""
    is_path = not name or "\0" in name or name in (".", "..") or Path(name).name != name
    try:
        return not is_path and len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:
        return False


def home_problem(path: str) -> str:
    """Return why a path that begins with ~ is refused, "" for any other. Only a shell replaces ~, and not after `=`."""
    if not path.startswith("~"):
        return ""
    return f"{path} begins with ~, which was not replaced; write the whole path (in a shell, $HOME/…), or ./{path}."


def similar_path(path: Path) -> Path | None:
    """Return the neighbour of a missing path with the most similar name, as a suggestion; None if none is similar."""
    if not os.access(path.parent, os.R_OK | os.X_OK) or not path.parent.is_dir():
        return None
    names = difflib.get_close_matches(path.name, [neighbour.name for neighbour in path.parent.iterdir()], n=1)
    return path.parent / names[0] if names else None


def refuse_inside(out: Path, *folders: Path | None, advice: str = "choose another --out") -> None:
    """Raise InputError if `out` lies in one of the folders that a command reads, which must not change."""
    for folder in folders:
        if folder and lies_in(out, folder):
            raise InputError(f"{out} lies in {folder}, which this command reads and must not change; {advice}.")


def lies_in(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or lies inside it, however the two are spelled.

    Names alone do not tell on a disk that ignores case, or that is mounted twice.
    """
    path, folder = path.resolve(), folder.resolve()
    if path.is_relative_to(folder):
        return True
    with suppress(OSError):  # no folder, or one that may not be read
        identity = folder.stat()
        return any(os.path.samestat(each.stat(), identity) for each in (path, *path.parents) if each.exists())
    return False


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


def refuse_dangling(path: Path) -> None:
    """Raise CheckpointError if `path` is a dangling symlink."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a dangling symlink to {path.readlink()}; fetch the file again.")
