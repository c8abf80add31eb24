"""Where the output grows until it is complete: a folder beside OUT, a journal, one rename at the end.

    .OUT.groupwise/             removed once OUT stands
        lock                    held while a conversion runs
        journal.jsonl           first line: the fingerprint of inputs and parameters; then a line per finished piece
        folder/                 becomes OUT
        scratch/                what is worked out before it is written there
        replaced/               what --overwrite took away, until the new folder is in place

A killed run leaves this behind; the same command continues from its journal, any other starts afresh.
"""

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Self

from model.errors import CheckpointError


class Staging:
    """The staging area of one OUT; a context manager that holds its lock."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.root = out.parent / f".{out.name}.groupwise"
        self.folder = self.root / "folder"
        self.scratch = self.root / "scratch"
        self._journal = self.root / "journal.jsonl"
        self._replaced = self.root / "replaced"
        self.finished: dict[str, Any] = {}
        """What the journal says is done: name → what was recorded with it."""
        self._lock = -1
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(exist_ok=True)
            self._lock = os.open(self.root / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"cannot write beside {self.out}: {error.strerror}; choose another OUT.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.__exit__()
            raise CheckpointError(f"something else is writing {self.out}; wait for it or stop it.") from error
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._lock)

    def open(self, fingerprint: str) -> None:
        """Continue the run with this fingerprint if there is one, else start with an empty folder."""
        lines = _read_lines(self._journal)
        if lines[:1] == [{"fingerprint": fingerprint}] and self.folder.is_dir():
            self.finished = {line["name"]: line["record"] for line in lines[1:]}
            write_file(self._journal, "".join(json.dumps(line) + "\n" for line in lines).encode())  # without a cut end
            return
        self._remove_contents()
        self.folder.mkdir()
        write_file(self._journal, (json.dumps({"fingerprint": fingerprint}) + "\n").encode())

    def record(self, name: str, record: Any) -> None:
        """Write down what was found out. Should a power cut lose the line, it is found out again."""
        with self._writing:
            with self._journal.open("a") as file:
                file.write(json.dumps({"name": name, "record": record}) + "\n")
            self.finished[name] = record

    def record_file(self, name: str, record: Any) -> None:
        """Write down that a file in the folder is finished. Its content must have reached the disk already."""
        sync_folder(self.folder)
        self.record(name, record)

    def publish(self) -> None:
        """Make the finished folder OUT. What OUT was before is removed once the new one is in its place."""
        sync_folder(self.folder)
        if self.out.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.out.rename(self._replaced)
        try:
            self.folder.rename(self.out)
        except OSError:
            if self._replaced.exists():
                self._replaced.rename(self.out)
            raise
        sync_folder(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the staging area. What a killed run took away and did not replace goes back to its place."""
        if self._replaced.exists() and not self.out.exists():
            self._replaced.rename(self.out)
        shutil.rmtree(self.root)

    def _remove_contents(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._journal.unlink(missing_ok=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a journal, up to where a kill or a power cut broke it off."""
    lines = []
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            lines.append(json.loads(text) if text.endswith(b"\n") else None)
        except ValueError:
            break
    return [line for line in lines if line]


def write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def sync_file(path: Path) -> None:
    """See a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """See a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
