"""Write output folders atomically and resumably: a staging area beside OUT, a journal, and one rename at the end.

    .OUT.groupwise/             removed once OUT is complete
        lock                    see `model.files.lock.FileLock`
        journal.jsonl           first line: digests of the command's inputs; then a line per finished piece
        folder/                 becomes OUT
        scratch/                intermediate results
        replaced/               the folder that --overwrite replaces, until the new one is in its place

A killed run leaves the staging area behind. The same command resumes from its journal; a command with other inputs is
refused while the area holds finished work, and starts afresh otherwise. Both first restore a folder that the killed run
moved away and did not replace.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from model.common import console
from model.common.errors import CheckpointError, RunError
from model.files.lock import FileLock, LockedError
from model.files.paths import MAX_NAME, check_name
from model.files.write import remove_temporary_files, replace_file, sync_folder

_PREFIX, _SUFFIX = ".", ".groupwise"
CHECKSUM = "sha256 "
"""How the journal's keys of checksums begin."""
AREAS = f"{_PREFIX}*{_SUFFIX}"
"""Pattern of the names of staging areas."""
_MAX_OUT_NAME = MAX_NAME - len(_PREFIX + _SUFFIX) - len("-01234567.owner")
"""Longest name of OUT in bytes: the names of the staging area and of its lock contain it."""


def check_out(out: Path) -> None:
    """Raise InputError if the name of OUT is not UTF-8 or too long, or if OUT is a link that leads in a circle."""
    check_name(out, "OUT", _MAX_OUT_NAME)
    try:
        out.resolve()
    except FileNotFoundError:  # the working directory was deleted, which the command line explains
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"OUT ({out}) is not a usable path: {error}.") from error


def check_room(out: Path, needed: int, advice: str = "make room or choose another OUT") -> None:
    """Raise CheckpointError if the disk of the folder OUT has less than `needed` bytes free."""
    free = shutil.disk_usage(next(parent for parent in out.absolute().parents if parent.exists())).free
    if needed > free:
        raise CheckpointError(
            f"{out.parent} has {console.format_bytes(free)} free, but {console.format_bytes(needed)} are needed; "
            f"{advice}."
        )


class Staging:
    """The staging area of one OUT; a context manager that holds the area's lock."""

    def __init__(self, out: Path, may_replace: Callable[[Path], bool] | None = None) -> None:
        """`may_replace`: returns whether the folder at OUT may be replaced. By default nothing may be replaced."""
        check_out(out)
        self.out = out
        self.root = out.parent / f"{_PREFIX}{out.name}{_SUFFIX}"
        self.folder = self.root / "folder"
        self.scratch = self.root / "scratch"
        self._may_replace = may_replace
        self._journal = self.root / "journal.jsonl"
        self._replaced = self.root / "replaced"
        self.finished: dict[str, Any] = {}
        """The finished pieces in the journal: name → record."""
        self._patterns: Sequence[str] = ()
        """Patterns of the files in the scratch folder that are finished pieces (`open`)."""
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        """Acquire the lock.

        Raises CheckpointError if another process holds it, the area is or holds a link, or OUT may not be replaced.
        Raises OSError if the disk is full or fails.
        """
        self._take_lock()
        try:
            self._refuse_links()
            self._recover()
            if os.path.lexists(self.out) and not self._is_replaceable():
                raise CheckpointError(f"{self.out} exists; choose another name, or remove it.")
        except BaseException:
            self._release()
            raise
        return self

    def _take_lock(self) -> None:
        for _ in range(10):
            try:
                self.root.parent.mkdir(parents=True, exist_ok=True)
                self.root.mkdir(exist_ok=True)
                if self.root.is_symlink():  # what it leads to would be written, and removed
                    raise CheckpointError(f"{self.root} is a link, but a staging area is none; remove it.")
                self._lock = FileLock(self.root / "lock").__enter__()
                return
            except LockedError as error:
                raise CheckpointError(f"{self.out} is being written by {error}; wait for it or stop it.") from error
            except FileNotFoundError as error:  # the process that held the lock has just removed the folder
                if not self.root.parent.exists():
                    raise CheckpointError(f"{self.root.parent} cannot be made; choose another folder.") from error
            except OSError as error:
                with suppress(OSError):  # another process may already use the folder
                    self.root.rmdir()
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    raise _write_error(error) from error
                if self.root.exists() and not self.root.is_dir():
                    raise CheckpointError(
                        f"{self.root} is a file, but a staging area is a folder; move it away."
                    ) from error
                raise CheckpointError(
                    f"cannot write beside {self.out}: {error.strerror}; choose another folder."
                ) from error
        raise CheckpointError(f"{self.root} is removed repeatedly by another process; stop that process.")

    def _refuse_links(self) -> None:
        """Raise CheckpointError for a link in the area, since what it leads to would be written or removed."""
        if link := next((path for path in sorted(self.root.iterdir()) if path.is_symlink()), None):
            raise CheckpointError(f"{link} is a link, but a staging area holds none; remove it.")

    def __exit__(self, *exc: object) -> None:
        self._release()

    def _release(self) -> None:
        """Release the lock; remove the staging area if it holds nothing else. Another process may use it otherwise."""
        if not self._lock.is_held:  # given back with the area
            return
        if self.root.is_dir() and not {path.name for path in self.root.iterdir()} - {"lock", "lock.owner"}:
            self._remove_root()
        self._lock.release()

    def _is_replaceable(self) -> bool:
        return self._may_replace is not None and self._may_replace(self.out)

    def _recover(self) -> None:
        """Restore the folder that a killed run moved away and did not replace; remove its leftovers."""
        if self._replaced.exists() and not os.path.lexists(self.out):
            self._replaced.rename(self.out)
            sync_folder(self.out.parent)
        if not self.folder.exists():  # it was renamed to OUT
            _remove(self._replaced)
            _remove(self.scratch)
            self._journal.unlink(missing_ok=True)
        elif self._replaced.exists():
            raise CheckpointError(
                f"{self.out} exists, and a killed run had moved the previous one to {self._replaced}; move one of them "
                "elsewhere."
            )
        remove_temporary_files(self._journal)
        stale_lock = re.compile(re.escape(self.root.name) + r"-[0-9a-f]{8}(\.owner)?")
        with suppress(PermissionError):  # a folder that may be written and not listed
            for path in self.out.parent.iterdir():
                if stale_lock.fullmatch(path.name):  # its folder was removed just before the kill
                    path.unlink(missing_ok=True)

    def open(self, inputs: Mapping[str, object], finished_files: Sequence[str] = ()) -> None:
        """Resume the run with these inputs if there is one, else start with an empty folder.

        `inputs`: all that the finished pieces depend on, as values for JSON, each under its name for users.
        `finished_files`: patterns of the files in the scratch folder that are finished pieces. Raises CheckpointError
        if the area holds finished work of a run with other inputs, and OSError, after removing the area, if the disk
        does not take even the journal.
        """
        digests = _digests(inputs)
        size = self._find_finished_work(digests, finished_files)
        if size is not None:
            os.truncate(self._journal, size)  # drop a line that was cut off by a kill
            return
        for left in (self.folder, self.scratch):
            if left.exists():
                shutil.rmtree(left)  # an error passes: what stays would be taken for this run's
        try:
            self.folder.mkdir()
            replace_file(self._journal, (json.dumps({"inputs": digests}) + "\n").encode())
        except OSError as error:
            with suppress(OSError, RunError):
                self.discard()
            raise _write_error(error) from error
        except KeyboardInterrupt:
            with suppress(OSError, RunError):
                self.discard()
            raise

    def check_inputs(self, inputs: Mapping[str, object], finished_files: Sequence[str] = ()) -> None:
        """Raise CheckpointError if `open` would, for a run with other inputs. Writes nothing, and needs no lock."""
        self._find_finished_work(_digests(inputs), finished_files)

    def _find_finished_work(self, digests: Mapping[str, str], finished_files: Sequence[str]) -> int | None:
        """Read what a run with these inputs has finished.

        Return the bytes of its journal before a broken line; None if there is no such run. Raises CheckpointError if
        there is finished work of a run with other inputs.
        """
        self._patterns = finished_files
        begun_with, self.finished, size = _read_journal(self._journal)
        if self.folder.is_dir():
            if begun_with == digests:
                return size
            if begun_with is not None and self.holds_finished_work:
                raise CheckpointError(
                    f"{self.root} holds the finished work of a command with {_difference(begun_with, digests)}; give "
                    "the same to continue it, or remove that folder to start again."
                )
        self.finished = {}
        return None

    @property
    def holds_finished_work(self) -> bool:
        """Whether a piece is finished. A checksum is none: to compute it again takes seconds."""
        pieces = (name for name in self.finished if not name.startswith(CHECKSUM))
        return any(True for _ in pieces) or any(True for pattern in self._patterns for _ in self.scratch.rglob(pattern))

    def record(self, name: str, record: Any) -> None:
        """Append a finished piece to the journal. (If a power failure loses the line, the piece is rebuilt.)"""
        with self._writing:
            with self._journal.open("a") as file:
                file.write(json.dumps({"name": name, "record": record}) + "\n")
            self.finished[name] = record

    def record_file(self, name: str, record: Any) -> None:
        """Append a finished file of the folder to the journal. The caller has flushed its content to the disk.

        Raises RunError if another process writes into the area too (see `FileLock.check`).
        """
        self._lock.check()
        sync_folder(self.folder)
        self.record(name, record)

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove every other file from the folder, and empty folders. `names` are relative to the folder."""
        kept = {self.folder / name for name in names}
        for path in sorted(self.folder.rglob("*"), reverse=True):  # a folder comes after its content
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):
                    path.rmdir()  # fails if the folder is not empty
            elif path not in kept:
                path.unlink()

    def publish(self) -> None:
        """Rename the finished folder to OUT.

        Raises FileExistsError if OUT was created meanwhile and may not be replaced, and RunError if another process
        writes into the area too. All finished work is kept.
        """
        self._lock.check()
        sync_folder(self.folder)
        if os.path.lexists(self.out):
            if not self._is_replaceable():
                raise FileExistsError(f"{self.out} was created during the run; move it elsewhere")
            self._move_away()
        try:
            self.folder.rename(self.out)  # by POSIX it fails unless OUT is absent or an empty folder
        except OSError:
            # A server that repeats a request reports the failure of the second, after the first succeeded.
            if self.folder.exists() or not self.out.is_dir():
                if self._replaced.exists():
                    self._replaced.rename(self.out)
                raise
        sync_folder(self.out.parent)
        try:
            self.discard()
        except (OSError, RunError, KeyboardInterrupt) as error:  # OUT is complete nevertheless
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else error
            console.warn(f"{self.root} could not be removed ({reason}); it is no longer needed.")

    def _move_away(self) -> None:
        """Move the folder at OUT away, which the new one replaces. Raises RunError if the file system cannot do it."""
        try:
            self.out.rename(self._replaced)
        except OSError as error:
            if self._replaced.exists() and not os.path.lexists(self.out):  # as in `publish`
                return
            if error.errno not in (errno.EXDEV, errno.EBUSY, errno.EACCES, errno.EPERM):
                raise
            # overlayfs does not rename folders of a container's image; SMB none of which a file is open
            raise RunError(
                f"{self.out} cannot be moved away ({error.strerror}); close what uses it, or remove it yourself"
            ) from error

    def discard(self) -> None:
        """Remove the staging area. A folder that a killed run moved away and did not replace is restored first.

        Raises RunError if another process writes into the area too.
        """
        self._lock.check()
        self._recover()
        for path in (self.folder, self.scratch):
            _remove(path)
        self._journal.unlink(missing_ok=True)
        self._remove_root()

    def _remove_root(self) -> None:
        """Remove the staging area while the lock is held.

        The locked file is moved out first: on NFS, a file that is removed while open stays under another name.
        """
        aside = self.out.parent / f"{self.root.name}-{secrets.token_hex(4)}"
        self._lock.move(aside)
        with suppress(OSError):  # another process may already use the folder
            self.root.rmdir()
        self._lock.release()


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes OUT at the end of the block, and is removed if the block fails.

    After a kill, the work starts again. Raises CheckpointError as `Staging` does.
    """
    with Staging(out) as staging:
        staging.open({"run": uuid4().hex})
        try:
            yield staging.folder
            staging.publish()
        except BaseException:
            staging.discard()
            raise


def _write_error(error: OSError) -> OSError:
    """Return an error of the first write into a staging area, with advice."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "make room" if is_full else "check the disk, or choose another folder"
    return OSError(f"{error.filename} cannot be written: {error.strerror}; {advice}.")


def _remove(folder: Path) -> None:
    """Remove a folder that is no longer needed. A failure is only a warning, because the work itself is done."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        console.warn(f"{folder} could not be removed ({error}); it is no longer needed.")


def _digests(inputs: Mapping[str, object]) -> dict[str, str]:
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in inputs.items()}


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what an earlier command had and this one has not, such as "another --seed, a --teacher"."""
    words = [f"{'another' if name in now else 'a'} {name}" for name in before if before[name] != now.get(name)]
    return ", ".join(words + [f"no {name}" for name in now if name not in before])


def _read_journal(path: Path) -> tuple[dict[str, str] | None, dict[str, Any], int]:
    """Return the digests of the inputs, the records by name, and the number of bytes before the first broken line."""
    begun_with, finished, size = None, {}, 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            if begun_with is None:
                begun_with = dict(entry["inputs"])
            else:
                finished[str(entry["name"])] = entry["record"]
        except (ValueError, LookupError, TypeError):
            break
        size += len(line)
    return begun_with, finished, size
