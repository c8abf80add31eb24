"""Save, rotate, find and load training checkpoints, with any number of processes.

Saving: all processes write into a folder of another name and see it to the disk; each says whether it could; then the
main process alone writes the manifest and renames the folder. A kill at any moment leaves the last complete checkpoint,
and what is left of an unfinished one is swept away by the next start.

Loading: the metadata is a pickle, and a RUN may come from anybody. The project's own reader reads it, and torch gets
what came of it; so no code of a checkpoint runs. `uptrain.checkpoints.files` says what the files are.
"""

import io
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from model.checkpoint.formats.dcp.metadata import FILE, Place, read_metadata
from model.common.errors import InputError
from model.common.files import sync_file, sync_folder
from uptrain.checkpoints.files import (
    MANIFEST,
    STATE,
    TENSORS,
    Checksums,
    State,
    checksum,
    find_damage,
    folder_name,
    list_checkpoints,
    read_state,
    step_of,
)
from uptrain.distributed.collectives import gather, on_main

UNFINISHED, REMOVED = ".unfinished-", ".removed-"
_SPARE = 1.2
"""Free space that a save asks for, over the size of the last one."""


class SaveError(OSError):
    """A checkpoint could not be written. The ones before it stand."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A verified checkpoint."""

    folder: Path
    state: State
    rejected: tuple[str, ...] = ()
    """What was wrong with newer ones, a line each."""


class Checkpoints:
    """The checkpoints of one run. All methods are called by all processes together."""

    def __init__(self, folder: Path, accelerator: Accelerator, keep_last: int) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self._keep_last = keep_last

    def clean_up(self) -> None:
        """Make the folder, and remove what a killed save or rotation left."""
        on_main(self._accelerator, self._sweep)

    def _sweep(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            mark, name = path.name[: path.name.find("step-")], path.name[path.name.find("step-") :]
            if mark in (UNFINISHED, REMOVED) and step_of(name) is not None:
                shutil.rmtree(path)

    def save(self, trainee: nn.Module, optimizer: torch.optim.Optimizer, state: State, keep: bool = False) -> None:
        """Write the checkpoint of `state["step"]`; `keep` exempts it from rotation.

        Raises SaveError on all processes if any of them failed; then the checkpoints are what they were.
        """
        final = self.folder / folder_name(state["step"])
        unfinished = self.folder / (UNFINISHED + final.name)
        try:
            self._raise_on_any(self._begin(unfinished))
            self._raise_on_any(_write_tensors(unfinished / TENSORS, trainee, optimizer))
            self._raise_on_any(self._finish(unfinished, final, {**state, "keep": keep}))
        except SaveError:
            on_main(self._accelerator, lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise

    def rotate(self, newest: int) -> str:
        """Remove older checkpoints than that of the step `newest`, but for the last few and those to be kept.

        Return why one could not be removed, as where a network's file system does not let go of a file that somebody
        reads, or an empty text; the next start sweeps it away.
        """
        return on_main(self._accelerator, lambda: self._rotate(newest))

    def _begin(self, unfinished: Path) -> str:
        if not self._accelerator.is_main_process:
            return ""
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            last = list(list_checkpoints(self.folder).values())[-1:]
            wanted = _SPARE * sum(f.stat().st_size for folder in last for f in folder.rglob("*") if f.is_file())
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
        self._raise_on_any(error)
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
            sums = {path.relative_to(folder).as_posix(): checksum(path) for path in paths}
            list(synced)  # raises what went wrong there
        return sums

    def _raise_on_any(self, error: str) -> None:
        """Raise SaveError on all processes if one of them met an error."""
        errors = [e for e in gather(self._accelerator, error) if e]
        if errors:
            raise SaveError(errors[0])

    def _rotate(self, newest: int) -> str:
        # Later ones than the newest are damaged, and were passed over: they do not count.
        try:
            steps = [step for step in list_checkpoints(self.folder) if step <= newest]
            for step in steps[: -self._keep_last]:
                path = self.folder / folder_name(step)
                if not _is_kept(path):
                    _remove(path)
        except OSError as error:
            return str(error)
        return ""

    def newest(self) -> VerifiedCheckpoint | None:
        """Return the newest checkpoint whose files are all as they were written; None if there is none at all.

        Raises InputError if there are some and none is whole.
        """
        rejected: list[str] = []
        for folder in on_main(self._accelerator, lambda: [*reversed(list_checkpoints(self.folder).values())]):
            problem = self.problem(folder)
            if not problem:
                try:
                    return VerifiedCheckpoint(folder, read_state(folder), tuple(rejected))
                except InputError as error:
                    problem = str(error)
            rejected.append(problem)
        if rejected:
            raise InputError(f"no checkpoint in {self.folder} is whole: {'; '.join(rejected)}.")
        return None

    def problem(self, folder: Path) -> str:
        """Say what is wrong with a checkpoint, or nothing. Every process checks its share of the files."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        problems = [p for p in gather(self._accelerator, find_damage(folder, rank, world)) if p]
        return problems[0] if problems else ""


def _is_kept(checkpoint: Path) -> bool:
    """Say whether rotation must spare a checkpoint. One whose state cannot be read is of no use to anyone."""
    try:
        return bool(read_state(checkpoint)["keep"])
    except InputError:
        return False


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. The rename makes it disappear as a whole."""
    removed = checkpoint.with_name(REMOVED + checkpoint.name)
    checkpoint.rename(removed)
    shutil.rmtree(removed)


def _publish(unfinished: Path, final: Path, files: Checksums, state: State) -> None:
    state_path = unfinished / STATE
    state_path.write_text(json.dumps(state, indent=2) + "\n")
    sync_file(state_path)
    files[STATE] = checksum(state_path)
    manifest = unfinished / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
    sync_file(manifest)
    sync_folder(unfinished / TENSORS)
    sync_folder(unfinished)
    if final.exists():  # damaged, or written again after going back
        _remove(final)
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
    """Put a checkpoint's tensors into a model and optimizer, over any number of processes.

    Raises InputError where they do not fit, or are not what torch.distributed.checkpoint writes.
    """
    reader = _Reader(folder / TENSORS)
    tensors: State = {"model": get_model_state_dict(trainee)}
    has_optimizer = any(name.startswith("optimizer.") for name in reader.read_metadata().state_dict_metadata)
    if has_optimizer:
        tensors["optimizer"] = get_optimizer_state_dict(trainee, optimizer)
    try:
        with _quiet():
            load_tensors(tensors, storage_reader=reader, planner=_Planner(), no_dist=_is_alone())
    except CheckpointException as error:  # a BaseException
        reasons = "; ".join(dict.fromkeys(str(failure) for failure, _ in error.failures.values()))
        raise InputError(f"{folder} does not fit the run's model and optimizer: {reasons}") from error
    set_model_state_dict(trainee, tensors["model"])
    if has_optimizer:
        set_optimizer_state_dict(trainee, optimizer, tensors["optimizer"])


class _Reader(FileSystemReader):
    """torch's reader, which would unpickle whatever the metadata are, with the metadata of the project's own."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, made anew of names, numbers and dtypes. Raises CheckpointError if it holds more."""
        path = Path(self.path) / FILE
        found = read_metadata(path)
        places: dict[MetadataIndex, _StorageInfo] = {}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in found.tensors.items():
            dtype = getattr(torch, entry.dtype)
            chunks = [ChunkStorageMetadata(torch.Size(c.start), torch.Size(c.shape)) for c in entry.chunks]
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks)
            places |= {MetadataIndex(name, torch.Size(c.start)): _storage_info(c.place) for c in entry.chunks}
        for name, place in found.others.items():
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _storage_info(place)
        return Metadata(entries, storage_data=places)


def _storage_info(place: Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.offset, place.length)


class _Planner(DefaultLoadPlanner):
    """torch's planner, which would unpickle whatever is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            torch.load(value, weights_only=True),
        )


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
