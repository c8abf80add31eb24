"""Training checkpoints: complete or not there, verified before use, and the same whatever the number of processes.

    RUN/checkpoints/step-00000120/
        tensors/              weights and optimizer states, float32, sharded by torch.distributed.checkpoint
        state.json            where the run stands
        manifest.json         every other file's size and CRC-32, by blocks of 64 MB; written last

Saving: all processes write into a folder of another name and see it to the disk; each says whether it could; then the
main process alone writes the manifest and renames the folder. Only then do older checkpoints go. A kill at any moment
leaves the last complete checkpoint, and what is left of an unfinished one is swept away by the next start.
"""

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from model.errors import InputError
from model.staging import sync_file, sync_folder
from uptrain.parallel import gather, on_main

TENSORS, STATE, MANIFEST = "tensors", "state.json", "manifest.json"
UNFINISHED, REMOVED = ".unfinished-", ".removed-"
_SPARE = 1.2
"""Free space that a save asks for, over the size of the last one."""
_BLOCK, _PIECE, _SUMMING_THREADS = 64 << 20, 4 << 20, 4
State = dict[str, Any]
Checksums = dict[str, dict[str, Any]]
"""File → `size`, and `crc32` of each block."""


class SaveError(OSError):
    """A checkpoint could not be written. The ones before it stand."""


@dataclass(frozen=True)
class Found:
    """A verified checkpoint."""

    folder: Path
    state: State
    passed_over: tuple[str, ...] = ()
    """What was wrong with newer ones, a line each."""


class Checkpoints:
    """The checkpoints of one run. All methods are called by all processes together."""

    def __init__(self, folder: Path, accelerator: Accelerator, keep_last: int) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self._keep_last = keep_last

    def sweep(self) -> None:
        """Make the folder, and remove what a killed save or rotation left."""
        on_main(self._accelerator, self._sweep)

    def _sweep(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            if path.name.startswith((UNFINISHED, REMOVED)):
                shutil.rmtree(path)

    def save(self, trainee: nn.Module, optimizer: torch.optim.Optimizer, state: State, keep: bool = False) -> str:
        """Write the checkpoint of `state["step"]`; `keep` exempts it from rotation.

        Return why an older one could not be removed, or an empty text. Raises SaveError on all processes if any of them
        failed; then the checkpoints are what they were.
        """
        final = self.folder / folder_name(state["step"])
        unfinished = self.folder / (UNFINISHED + final.name)
        try:
            self._agree(self._begin(unfinished))
            self._agree(_write_tensors(unfinished / TENSORS, trainee, optimizer))
            self._agree(self._finish(unfinished, final, {**state, "keep": keep}))
        except SaveError:
            on_main(self._accelerator, lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise
        return on_main(self._accelerator, lambda: self._rotate(final))

    def _begin(self, unfinished: Path) -> str:
        if not self._accelerator.is_main_process:
            return ""
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            last = max(complete(self.folder), default=None)
            wanted = _SPARE * sum(f.stat().st_size for f in last.rglob("*") if f.is_file()) if last else 0
            free = shutil.disk_usage(self.folder).free
            if free < wanted:
                return f"{free:,} bytes are free where a checkpoint wants {wanted:,.0f}"
            unfinished.mkdir(parents=True)
        except OSError as error:
            return str(error)
        return ""

    def _finish(self, unfinished: Path, final: Path, state: State) -> str:
        """See the files to the disk and take their checksums; then write state and manifest, and rename."""
        error, sums = "", {}
        try:
            sums = self._sync_and_sum(unfinished)
        except OSError as failure:
            error = str(failure)
        all_sums = gather(self._accelerator, sums)
        self._agree(error)
        if not self._accelerator.is_main_process:
            return ""
        try:
            files = {name: entry for part in all_sums for name, entry in part.items()}
            _publish(unfinished, final, files, state)
        except OSError as failure:
            return str(failure)
        return ""

    def _sync_and_sum(self, folder: Path) -> Checksums:
        """Do so for the files that this process wrote, the two side by side: one waits for the disk, one computes."""
        mine = re.compile(rf"__{self._accelerator.process_index}_\d+\.distcp")
        others = re.compile(r"__\d+_\d+\.distcp")
        paths = [
            path for path in sorted(folder.rglob("*"))
            if path.is_file()
            and (mine.fullmatch(path.name) or (self._accelerator.is_main_process and not others.fullmatch(path.name)))
        ]  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            synced = pool.map(sync_file, paths)
            sums = {path.relative_to(folder).as_posix(): _checksum(path) for path in paths}
            list(synced)  # raises what went wrong there
        return sums

    def _agree(self, error: str) -> None:
        """Raise SaveError on all processes if one of them met an error."""
        errors = [e for e in gather(self._accelerator, error) if e]
        if errors:
            raise SaveError(errors[0])

    def _rotate(self, newest: Path) -> str:
        """Remove all but the last few, and those to be kept. First a rename, so that none is ever half there.

        Later ones than the newest are damaged, and were passed over: they do not count. Return what failed, as where a
        network's file system does not let go of a file that somebody reads; the next start sweeps it away.
        """
        try:
            for path in sorted(p for p in complete(self.folder) if p <= newest)[: -self._keep_last]:
                if not _is_kept(path):
                    removed = path.with_name(REMOVED + path.name)
                    path.rename(removed)
                    shutil.rmtree(removed)
        except OSError as error:
            return str(error)
        return ""

    def newest(self) -> Found | None:
        """Return the newest checkpoint whose files are all as they were written; None if there is none at all.

        Raises InputError if there are some and none is whole.
        """
        passed_over: list[str] = []
        for folder in on_main(self._accelerator, lambda: sorted(complete(self.folder), reverse=True)):
            problem = self.problem(folder)
            if not problem:
                state = json.loads((folder / STATE).read_bytes())
                return Found(folder, state, tuple(passed_over))
            passed_over.append(problem)
        if passed_over:
            raise InputError(f"no checkpoint in {self.folder} is whole: {'; '.join(passed_over)}.")
        return None

    def problem(self, folder: Path) -> str:
        """Say what is wrong with a checkpoint, or nothing. Every process checks its share of the files."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        problems = [p for p in gather(self._accelerator, damage(folder, rank, world)) if p]
        return problems[0] if problems else ""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints that were finished, in no order."""
    return [p for p in folder.glob("step-*") if p.is_dir()] if folder.is_dir() else []


def _is_kept(folder: Path) -> bool:
    """Say whether rotation must spare a checkpoint. One whose state cannot be read is of no use to anyone."""
    try:
        return bool(json.loads((folder / STATE).read_bytes())["keep"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def damage(folder: Path, rank: int = 0, world: int = 1) -> str:
    """Compare a share of a checkpoint's files with its manifest; return what differs, or an empty text."""
    path = folder / MANIFEST
    try:
        files: Checksums = json.loads(path.read_bytes())["files"]
        for name, wanted in sorted(files.items())[rank::world]:
            path = folder / name
            found = path.stat().st_size
            if found != wanted["size"]:
                return f"{path} has {found} bytes instead of {wanted['size']}"
            if _checksum(path) != wanted:
                return f"{path} has other content than was written"
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is damaged ({error!r})"
    return ""


def _checksum(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with ThreadPoolExecutor(_SUMMING_THREADS) as pool:
        return {"size": size, "crc32": list(pool.map(partial(_sum_block, path), range(0, size, _BLOCK)))}


def _sum_block(path: Path, start: int) -> int:
    crc, end = 0, start + _BLOCK
    with path.open("rb") as file:
        file.seek(start)
        while piece := file.read(min(_PIECE, end - file.tell())):
            crc = zlib.crc32(piece, crc)
    return crc


def _publish(unfinished: Path, final: Path, files: Checksums, state: State) -> None:
    state_path = unfinished / STATE
    state_path.write_text(json.dumps(state, indent=2) + "\n")
    sync_file(state_path)
    files[STATE] = _checksum(state_path)
    manifest = unfinished / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
    sync_file(manifest)
    sync_folder(unfinished / TENSORS)
    sync_folder(unfinished)
    if final.exists():  # damaged, or written again after going back
        shutil.rmtree(final)
    unfinished.rename(final)
    sync_folder(final.parent)


def _write_tensors(folder: Path, trainee: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Write this process' share; return what failed, or an empty text."""
    tensors: State = {"model": get_model_state_dict(trainee)}
    if optimizer.state:  # none yet if every step so far was skipped
        tensors["optimizer"] = get_optimizer_state_dict(trainee, optimizer)
    try:
        with _quiet(), _without_zip_checksums():
            # One thread: what goes wrong in further ones, as a full disk, would be lost (torch 2.13).
            save_tensors(tensors, storage_writer=FileSystemWriter(folder, sync_files=False), no_dist=_is_alone())
    except CheckpointException as error:
        return "; ".join(str(failure[0]) for failure in error.failures.values())
    except OSError as error:
        return str(error)
    return ""


def load(folder: Path, trainee: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's tensors into a model and optimizer, over any number of processes."""
    reader = FileSystemReader(folder / TENSORS)
    tensors: State = {"model": get_model_state_dict(trainee)}
    has_optimizer = any(name.startswith("optimizer.") for name in reader.read_metadata().state_dict_metadata)
    if has_optimizer:
        tensors["optimizer"] = get_optimizer_state_dict(trainee, optimizer)
    try:
        with _quiet():
            load_tensors(tensors, storage_reader=reader, no_dist=_is_alone())
    except CheckpointException as error:  # a BaseException
        reasons = "; ".join(dict.fromkeys(str(failure) for failure, _ in error.failures.values()))
        raise InputError(f"{folder} does not fit the run's model and optimizer: {reasons}") from error
    set_model_state_dict(trainee, tensors["model"])
    if has_optimizer:
        set_optimizer_state_dict(trainee, optimizer, tensors["optimizer"])


def _is_alone() -> bool:
    return not dist.is_initialized()


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Let torch leave out its own checksum of each tensor, a third of the time; the manifest has one of each file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
