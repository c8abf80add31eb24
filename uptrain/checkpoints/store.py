"""Save, rotate and find training checkpoints, with any number of processes.

All ranks write into a temporary folder, sync their files, and report success or an error. Then the main process writes
the manifest and renames the folder. A kill at any moment leaves the last complete checkpoint. The next start removes
unfinished folders. See `uptrain.checkpoints.files` for the files.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from model.common.errors import InputError, RunError
from model.common.typed_json import json_bytes
from model.files.lock import LockLostError
from model.files.paths import leads_outside
from model.files.write import sync_file, sync_folder
from uptrain.checkpoints.files import (
    FREE_SPACE_FACTOR,
    MANIFEST,
    STATE,
    TENSORS,
    CheckpointState,
    Checksums,
    checksum,
    find_damage,
    folder_name,
    list_checkpoints,
    read_state,
    step_of,
)
from uptrain.checkpoints.tensors import SaveError, write_tensors
from uptrain.distributed.collectives import all_gather, on_main

UNFINISHED, REMOVED = ".unfinished-", ".removed-"
_NFS_SECONDS = 60
"""The longest time that a client of NFS remembers, by default, that a folder was missing (nfs(5), `acdirmax`)."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files match its manifest, and its state."""

    folder: Path
    state: CheckpointState
    rejected: tuple[str, ...] = ()
    """Damage of newer checkpoints, one line each."""


LOCK_SECONDS = 5
"""Seconds between two looks at the run's lock."""


class CheckpointStore:
    """Checkpoints of one run. All methods are collective: every rank must call them.

    `check_lock` is called on the main process before a checkpoint is published, and by `has_lost_lock`. It raises
    LockLostError if another training writes into the run, see `FileLock.check`.
    """

    def __init__(
        self, folder: Path, accelerator: Accelerator, keep_last: int, save_every: int, check_lock: Callable[[], None]
    ) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self._keep_last, self._save_every = keep_last, save_every
        self._check_lock = check_lock
        self._looked_at_lock, self._was_lost = time.monotonic(), False
        self._damaged: list[Path] = []

    def clean_up(self) -> None:
        """Make the folder, and remove leftovers of a killed save or rotation.

        Raises InputError on all ranks if one of them does not find the folder.
        """
        on_main(self._accelerator, self._remove_leftovers)
        if not all(all_gather(self._accelerator, _first_missing([self.folder]) is None)):
            raise InputError(
                f"not every process finds {self.folder}; put the run into a folder that all machines share."
            )

    def _remove_leftovers(self) -> None:
        if leads_outside(self.folder, self.folder.parent):  # rotation would remove another run's checkpoints
            raise InputError(
                f"{self.folder} is a link out of the run, whose checkpoints may be those of another; move them here. "
                "For another disk, put the whole run there."
            )
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            prefix, name = path.name[: path.name.find("step-")], path.name[path.name.find("step-") :]
            if prefix in (UNFINISHED, REMOVED) and step_of(name) is not None:
                shutil.rmtree(path, ignore_errors=True)  # what is being read on a network disk goes at a later start

    def save(
        self, loss_module: nn.Module, optimizer: torch.optim.Optimizer, state: CheckpointState, keep: bool = False
    ) -> None:
        """Write the checkpoint of `state["step"]`; `keep` marks the one to extend the run from.

        Raises SaveError on all ranks if any of them failed, and RunError if another training writes into the run. The
        existing checkpoints are unchanged then.
        """
        final = self.folder / folder_name(state["step"])
        unfinished = self.folder / (UNFINISHED + final.name)
        try:
            with self._raising_together():
                self._begin(unfinished)
            with self._raising_together():
                write_tensors(unfinished / TENSORS, loss_module, optimizer)
            self._finish(unfinished, final, {**state, "keep": keep})
            self._damaged = [folder for folder in self._damaged if folder != final]
        except SaveError:
            on_main(self._accelerator, lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise

    def rotate(self, newest: int, decay_start: int | None) -> str:
        """Remove checkpoints before step `newest`, except the last ones and the one to extend the run from.

        The last ones are the last `keep_last` of all, and the last `keep_last` of those each `save_every` steps, which
        saves by time must not push out: a run may have to go back further than these reach. The one to extend from is
        the newest one up to `decay_start`: saving at that very step may have failed. Return an error, or "". Some
        network file systems do not remove a file while it is read; the next start removes it then.
        """
        return on_main(self._accelerator, lambda: self._rotate(newest, decay_start))

    @contextmanager
    def _raising_together(self) -> Iterator[None]:
        """Raise SaveError on all ranks if the block raises OSError on any of them."""
        message = ""
        try:
            yield
        except OSError as error:
            message = str(error) or repr(error)
        messages = [each for each in all_gather(self._accelerator, message) if each]
        if messages:
            raise SaveError(messages[0])

    def _begin(self, unfinished: Path) -> None:
        """Make the temporary folder, on the main process. Raises OSError, also if the disk has too little space."""
        if not self._accelerator.is_main_process:
            return
        shutil.rmtree(unfinished, ignore_errors=True)
        last = list(list_checkpoints(self.folder).values())[-1:]
        last_bytes = sum(f.stat().st_size for folder in last for f in folder.rglob("*") if f.is_file())
        required = FREE_SPACE_FACTOR * last_bytes
        free = shutil.disk_usage(self.folder).free
        if free < required:
            raise SaveError(f"{free:,} bytes are free, but a checkpoint needs {required:,.0f}")
        unfinished.mkdir(parents=True)

    def check_lock(self) -> None:
        """Raise an error on all ranks if another training has taken the lock."""
        on_main(self._accelerator, self._check_lock)

    def has_lost_lock(self) -> bool:
        """Return whether another training has taken the lock; not collective, and False on other ranks than the main.

        Two looks in a row must find it, LOCK_SECONDS apart: a shared disk may lose sight of a file for a moment.
        """
        now = time.monotonic()
        if not self._accelerator.is_main_process or now < self._looked_at_lock + LOCK_SECONDS:
            return False
        self._looked_at_lock = now
        was_lost = self._was_lost
        try:
            self._check_lock()
            self._was_lost = False
        except LockLostError:
            self._was_lost = True
        return was_lost and self._was_lost

    def _finish(self, unfinished: Path, final: Path, state: CheckpointState) -> None:
        """Sync the files and compute their checksums; then write state and manifest, and rename the folder."""
        with self._raising_together():
            sums = self._sync_and_sum(unfinished)
        all_sums = all_gather(self._accelerator, sums)
        self.check_lock()
        with self._raising_together():
            if self._accelerator.is_main_process:
                files = {name: entry for of_rank in all_sums for name, entry in of_rank.items()}
                if absent := [name for name in files if not (unfinished / name).is_file()]:
                    raise SaveError(
                        f"another process wrote {absent[0]} to a disk of its own; put the run into a folder that all "
                        "machines share"
                    )
                _publish(unfinished, final, files, state)

    def _sync_and_sum(self, folder: Path) -> Checksums:
        """Sync the files of this rank and return their checksums. Syncing waits for the disk in another thread.

        The main process also handles files that belong to no rank.
        """
        of_this_rank = re.compile(rf"__{self._accelerator.process_index}_\d+\.distcp")
        of_any_rank = re.compile(r"__\d+_\d+\.distcp")
        is_main = self._accelerator.is_main_process
        paths = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
            and (of_this_rank.fullmatch(path.name) or (is_main and not of_any_rank.fullmatch(path.name)))
        ]
        with ThreadPoolExecutor(1) as pool:
            synced = pool.map(sync_file, paths)
            sums = {path.relative_to(folder).as_posix(): checksum(path) for path in paths}
            list(synced)  # raises the thread's errors
        return sums

    def _rotate(self, newest: int, decay_start: int | None) -> str:
        # Checkpoints after `newest` are damaged, and are written again: they do not count.
        try:
            steps = [step for step in list_checkpoints(self.folder) if step <= newest]
            for damaged in self._damaged:  # they must not take the place of a whole one
                if damaged.exists():
                    _remove(damaged)
                steps = [step for step in steps if folder_name(step) != damaged.name]
            regular = [step for step in steps if step % self._save_every == 0]
            before_decay = [step for step in steps if decay_start is not None and step <= decay_start]
            kept = {*steps[-self._keep_last :], *regular[-self._keep_last :], *before_decay[-1:]}
            for step in steps:
                if step not in kept:
                    _remove(self.folder / folder_name(step))
        except OSError as error:
            return str(error)
        return ""

    def newest(self) -> VerifiedCheckpoint | None:
        """Return the newest intact checkpoint; None if there is no checkpoint.

        Raises InputError if all checkpoints are damaged, and RunError if the disk of one cannot be read, each on all
        ranks.
        """
        rejected: list[str] = []
        for folder in on_main(self._accelerator, lambda: [*reversed(list_checkpoints(self.folder).values())]):
            damage = self.verify(folder)
            if not damage:
                try:
                    state = on_main(self._accelerator, partial(_state_of_verified, folder))
                    return VerifiedCheckpoint(folder, state, tuple(rejected))
                except InputError as error:
                    damage = str(error)
            rejected.append(damage)
            self._damaged.append(folder)
        if rejected:
            raise InputError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(rejected)}. Remove them to begin at step 0."
            )
        return None

    def verify(self, folder: Path) -> str:
        """Return the damage of a checkpoint, or "". Each rank verifies a part of the files.

        A file is missing only if no rank finds it: one machine's view of a shared disk may be older than another's.
        Raises RunError on all ranks if one of them cannot read a file that is there.
        """
        damage = unreadable = ""
        names = {name for names in all_gather(self._accelerator, _file_names(folder)) for name in names}
        try:
            if missing := _first_missing(folder / name for name in sorted(names)):
                unreadable = f"process {self._accelerator.process_index} does not find {missing}, but another does"
            else:
                damage = find_damage(folder, self._accelerator.process_index, self._accelerator.num_processes)
        except OSError as error:
            unreadable = str(error)
        found = all_gather(self._accelerator, (damage, unreadable))
        if problem := next((problem for _, problem in found if problem), ""):
            raise RunError(_unreadable(folder, problem))
        return next((damage for damage, _ in found if damage), "")


def _file_names(checkpoint: Path) -> list[str]:
    """Return the names of the files that this process finds in a checkpoint; none if its disk cannot be read."""
    try:
        return [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    except OSError:  # `find_damage` reports it
        return []


def _first_missing(paths: Iterable[Path]) -> Path | None:
    """Wait up to _NFS_SECONDS for paths that another process sees; return the first that does not appear, or None."""
    deadline = time.monotonic() + _NFS_SECONDS
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline:
                return path
            time.sleep(0.5)
    return None


def _state_of_verified(checkpoint: Path) -> CheckpointState:
    """Return the state of a checkpoint whose file has just been intact. Raises OSError if it cannot be read now."""
    try:
        return read_state(checkpoint)
    except InputError as error:
        if isinstance(error.__cause__, OSError):
            raise OSError(_unreadable(checkpoint, str(error.__cause__))) from error
        raise


def _unreadable(checkpoint: Path, problem: str) -> str:
    return f"a file of {checkpoint} cannot be read ({problem}); try again when its disk can be read."


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint atomically: rename it first."""
    removed = checkpoint.with_name(REMOVED + checkpoint.name)
    shutil.rmtree(removed, ignore_errors=True)  # of an earlier attempt
    checkpoint.rename(removed)
    shutil.rmtree(removed)


def _publish(unfinished: Path, final: Path, files: Checksums, state: CheckpointState) -> None:
    state_path = unfinished / STATE
    state_path.write_bytes(json_bytes(state))
    sync_file(state_path)
    files[STATE] = checksum(state_path)
    manifest = unfinished / MANIFEST
    manifest.write_bytes(json_bytes({"format": 1, "files": files}))
    sync_file(manifest)
    sync_folder(unfinished / TENSORS)
    sync_folder(unfinished)
    if final.exists():  # damaged, or written again after resuming at an earlier step
        _remove(final)
    unfinished.rename(final)
    sync_folder(final.parent)
