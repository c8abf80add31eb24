"""Lock a file, so that only one process writes where it lies."""

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from model.common.errors import InputError, RunError
from model.common.processes import is_running, pid_namespace, process_start

_LOCK_TRIES = 100
"""Attempts to lock a file that another process may remove between opening and locking, which is rare."""
_WRITING_SECONDS = 3.0
"""The longest time in which the owner of a new lock writes its name, also on a busy machine."""


class LockedError(Exception):
    """Another process holds the lock; the message names it."""


class LockLostError(RunError):
    """Another process has taken the lock, or somebody has removed its file."""


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
            except OSError as error:
                error.filename = error.filename or str(self.path)  # a write's error names no file
                raise
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
        """Raise LockLostError if the file names another process, or is gone.

        So it is if flock(2) holds on one machine only (Lustre with `-o localflock`, NFS with `-o nolock`), and another
        machine has locked the file too. A file that cannot be read for the moment says nothing.
        """
        try:
            owner = _read(self.path)
        except OSError:
            return
        if owner != self._identity:
            taken = f"names {_describe(owner)}" if owner else "is gone"
            raise LockLostError(
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
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._identity.encode(), 0)
        except OSError:  # as on a full disk, where the empty file would stay
            with suppress(OSError):
                if not _read(self.path):  # not that of another process, which would have written its name
                    self.path.unlink()
            raise
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
            file = self._owner_path.open("x")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._identity)
        except OSError:  # an empty file would name nobody, and so block all
            self._owner_path.unlink(missing_ok=True)
            raise
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
