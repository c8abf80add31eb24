"""Write, replace, copy, compare, hash, sync and lock files."""

import errno
import fcntl
import filecmp
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Self

from model.common.errors import InputError, RunError
from model.common.processes import is_running, pid_namespace, process_start

_SPARE_FILES = 64
"""Files that a process may open besides those that it counts."""
MAX_NAME = 255
"""Largest number of bytes in a file name on Linux and macOS file systems."""
_LOCK_TRIES = 100
"""Attempts to lock a file that another process may remove between opening and locking, which is rare."""
_WRITING_SECONDS = 3.0
"""The longest time in which the owner of a new lock writes its name, also on a busy machine."""
_HASHED_BYTES = 1 << 20
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
    """Replace a file atomically. A kill or a full disk leaves the old or the new content, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        sync_file(temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # writing names no file
        raise


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


def tree_bytes(folder: Path) -> int:
    """Return the bytes that all files below a folder take on the disk, less where they have holes; 0 if there is none.

    Another process may be removing the files.
    """
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, skips folders that disappear
        for name in names:
            with suppress(FileNotFoundError):
                stat = Path(parent, name).lstat()
                # Some network file systems do not count blocks.
                total += min(stat.st_size, _BLOCK * stat.st_blocks) if stat.st_blocks else stat.st_size
    return total


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, if the file system supports it (CIFS and some FUSE mounts do not)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
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


def check_name(path: Path, what: str, longest: int = MAX_NAME) -> None:
    """Raise InputError if a path is not UTF-8, which JSON requires, or its last part has more than `longest` bytes."""
    shown = os.fsencode(path).decode(errors="backslashreplace")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} ({shown}) has a name that is not UTF-8; rename it.") from error
    if len(os.fsencode(path.name)) > longest:
        raise InputError(f"{what} ({shown}) has a name of more than {longest} bytes; choose a shorter one.")


def home_problem(path: str) -> str:
    """Return why a path that begins with ~ is refused, "" for any other. Only a shell replaces ~, and not after `=`."""
    if not path.startswith("~"):
        return ""
    return f"{path} begins with ~, which was not replaced; write the whole path (in a shell, $HOME/…), or ./{path}."


def is_plain_name(name: str) -> bool:
    """Return whether a name can be that of a file directly in a folder: not a path, in UTF-8, not too long."""
    is_path = not name or "\0" in name or name in (".", "..") or Path(name).name != name
    try:
        return not is_path and len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:
        return False


class LockedError(Exception):
    """Another process holds the lock; the message names it."""


class FileLock:
    """An exclusive lock on a file created for it; a context manager. The lock ends with the process that holds it.

    It uses flock(2). NFS turns this into a lock on the server, for files that are open for writing. If a file system
    has no flock (Lustre without `-o flock`, some FUSE mounts), a file PATH.owner represents the lock. That file
    outlives a killed process: the next process on the same machine detects this and takes the lock over; on other
    machines, and in other containers, the file must be removed by hand.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner_path = path.with_name(f"{path.name}.owner")
        self._descriptor = -1
        self._is_held = self._owns_file = False
        pid = os.getpid()
        self._identity = json.dumps({
            "host": socket.gethostname(), "pid": pid, "started": process_start(pid), "pid_namespace": pid_namespace(),
            "token": secrets.token_hex(8),
        })  # fmt: skip

    @property
    def is_held(self) -> bool:
        return self._is_held

    def __enter__(self) -> Self:
        """Acquire the lock.

        Raises LockedError if another process holds it, InputError if the path is a link or no regular file, and OSError
        if no file can be created or written.
        """
        for _ in range(_LOCK_TRIES):
            self._descriptor = self._open()
            try:
                self._lock()
                self._is_held = self._is_in_place()  # False if the last holder removed the file since it was opened
            finally:
                if not self._is_held:
                    self.release()
            if self._is_held:
                return self
        raise OSError(
            errno.ENOLCK, "what is written into the lock file cannot be read back; its file system has no usable locks",
            str(self.path),
        )  # fmt: skip

    def _open(self) -> int:
        """Open or create the file. A folder of somebody else may have a link there, whose target must stay as it is."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags, 0o666)
        except OSError:
            if self.path.is_symlink():
                raise InputError(f"{self.path} is a link, but a lock file is none; remove it.") from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InputError(f"{self.path} is not a regular file, so it is no lock file; remove it.")
        return descriptor

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file and release the lock, if it is held. The file may be that of a process on another machine."""
        if self._is_held and _read(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        if self._owns_file:
            self._owner_path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._is_held, self._owns_file = -1, False, False

    def check(self) -> None:
        """Raise RunError if the file names another process, or is gone.

        So it is if flock(2) holds on one machine only (Lustre with `-o localflock`, NFS with `-o nolock`), and another
        machine has locked the file too. A file that cannot be read for the moment says nothing.
        """
        try:
            owner = _read(self.path)
        except OSError:
            return
        if owner != self._identity:
            taken = f"names {_describe(owner)}" if owner else "is gone"
            raise RunError(
                f"{self.path} {taken}: another process writes here too, because locks of this file system hold on one "
                "machine only, or because the file was removed. Stop all but one of them"
            )

    def move(self, path: Path) -> None:
        """Rename the locked file, so that its folder can be removed."""
        self.path = self.path.rename(path)
        if self._owns_file:
            self._owner_path = self._owner_path.rename(path.with_name(f"{path.name}.owner"))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # NFS may raise either
            raise LockedError(_describe(_read_owner(self.path))) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
                raise
            self._create_owner_file()

    def _is_in_place(self) -> bool:
        """Return whether the path still leads to the locked file. (Some file systems have unreliable inode numbers.)"""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._identity.encode(), 0)
        return _read(self.path) == self._identity

    def _create_owner_file(self) -> None:
        if not self._try_to_create():
            owner = _read_owner(self._owner_path)
            if not _has_ended(owner):
                raise LockedError(f"{_describe(owner)}; if that has ended, remove {self._owner_path}")
            self._owner_path.unlink(missing_ok=True)
            if not self._try_to_create():
                raise LockedError(_describe(_read_owner(self._owner_path)))
            time.sleep(0.2)  # another process may have read the same stale owner file, and remove ours instead
            if _read(self._owner_path) != self._identity:
                raise LockedError(_describe(_read(self._owner_path)))
        self._owns_file = True

    def _try_to_create(self) -> bool:
        try:
            with self._owner_path.open("x") as file:
                file.write(self._identity)
        except FileExistsError:
            return False
        return True


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:1000]
    except FileNotFoundError:
        return ""


def _read_owner(path: Path) -> str:
    """Return what a lock's file says of its owner, who may be about to write it."""
    deadline = time.monotonic() + _WRITING_SECONDS
    while not (owner := _read(path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return owner


def _parse(owner: str) -> tuple[str, int]:
    """Return a lock owner's host name and process id; "" and 0 if the text does not contain them."""
    match = re.match(r'\{"host": "([\w.-]*)", "pid": (\d{1,9}),', owner)
    return (match[1], int(match[2])) if match else ("", 0)


def _describe(owner: str) -> str:
    host, pid = _parse(owner)
    return f"process {pid} on {host}" if pid else "another process"


def _has_ended(owner: str) -> bool:
    """Return whether the owner was a process of this machine, and of this container, that no longer exists."""
    host, pid = _parse(owner)
    if not pid or host != socket.gethostname():
        return False
    try:
        identity = json.loads(owner)
    except ValueError:
        return False
    started = identity.get("started")
    in_here = identity.get("pid_namespace") == pid_namespace()
    return in_here and not is_running(pid, started if isinstance(started, float) else None)
