"""Write, replace, copy, compare, hash and sync files."""

import errno
import filecmp
import hashlib
import os
import re
import resource
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Event

from model.common.errors import InputError

_SPARE_FILES = 64
"""Files that a process may open besides those that it counts."""
_HASHED_BYTES = 1 << 20
_NO_FSYNC_OF_FOLDERS = (
    errno.EINVAL, errno.EBADF, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP,
)  # fmt: skip
"""The errors by which file systems say that they cannot flush a folder. Those of a disk that fails are others."""
_BLOCK = 512
"""Bytes of a block of `st_blocks` (POSIX)."""


class StoppedError(Exception):
    """Reading was stopped from another thread."""


def file_sha256(path: Path, stop: Event | None = None) -> str:
    """Return the SHA-256 of a file, read in blocks. Raises StoppedError soon after another thread sets `stop`."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_HASHED_BYTES))
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(block):
            digest.update(block[:n])
            if stop is not None and stop.is_set():
                raise StoppedError
    return digest.hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Write a file, and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. A kill or a full disk leaves the old or the new content, never a mixture.

    No link is followed: neither one at `path`, nor one of somebody else at the name of the temporary file. A kill may
    leave that file, see `remove_temporary_files`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = temporary.open("xb")  # fails if anything has the name, also a link
    try:
        with file:
            file.write(content)
        sync_file(temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # writing names no file
        raise


def remove_temporary_files(path: Path) -> None:
    """Remove what kills in `replace_file` have left beside a file. No other process may be replacing the file."""
    temporary = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]+")  # earlier versions ended it with a process id
    for other in path.parent.glob(".*"):
        if temporary.fullmatch(other.name):
            with suppress(OSError):  # a folder, or a file that the disk does not give up; neither does harm
                other.unlink()


def copy_file(source: Path | bytes, target: Path) -> None:
    """Copy a file in bounded memory, or write bytes, and create the parent folders.

    The copy has the permissions of a new file, not those of the source.
    """
    if isinstance(source, bytes):
        write_file(target, source)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def has_content(path: Path, expected: Path | bytes) -> bool:
    """Return whether a file equals another file or the given bytes. Memory is bounded."""
    if isinstance(expected, Path):
        return filecmp.cmp(path, expected, shallow=False)
    return path.stat().st_size == len(expected) and path.read_bytes() == expected


def allow_open_files(n: int) -> None:
    """Raise this process's limit of open files so that it can open `n` more. Each mapped file stays open.

    Raises InputError if the system does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(list(Path("/dev/fd").iterdir())) + n + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        raise InputError(
            f"{wanted:,} files must be open at the same time, but the system allows {hard:,} to a process; let an "
            f"administrator raise the hard limit (`ulimit -Hn {wanted}`)."
        ) from error


def tree_bytes(folder: Path) -> int:
    """Return the bytes that all files below a folder take on the disk, less where they have holes; 0 if there is none.

    Another process may be removing the files.
    """
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, skips folders that disappear
        for name in names:
            with suppress(FileNotFoundError):
                info = Path(parent, name).lstat()
                # Some network file systems do not count blocks.
                total += min(info.st_size, _BLOCK * info.st_blocks) if info.st_blocks else info.st_size
    return total


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, if the file system supports it (CIFS and some FUSE mounts do not).

    Nor can a folder be flushed that may be written but not read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, synced: str | None = None) -> None:
    """Flush a folder and everything in it to the disk, but for files with the suffix `synced`, which are there already.

    Call it after all writes, so that the disk can combine them.
    """
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_folder(path)
        elif path.suffix != synced:
            sync_file(path)
