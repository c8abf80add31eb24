"""Save, rotate, find and load training checkpoints, with any world size.

Save: all ranks write into a temporary folder, sync their files, and report success or an error. Then the main process
writes the manifest and renames the folder. A kill at any moment leaves the last complete checkpoint. The next start
removes unfinished folders.

Load: the metadata is a pickle, and runs may be untrusted. Our own reader parses it without executing code, and passes
the result to torch. See `uptrain.checkpoints.files` for the files.

Frozen parameters are not part of a checkpoint. They are in the files of the model that the run began with.
"""

import io
import json
import re
import shutil
import time
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
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from model.checkpoint.formats.dcp.metadata import METADATA, Place, read_metadata
from model.common.errors import InputError, RunError
from model.common.files import sync_file, sync_folder
from uptrain.checkpoints.files import (
    MANIFEST,
    SPARE,
    STATE,
    TENSORS,
    Checksums,
    State,
    checksum,
    find_damage,
    folder_name,
    is_kept,
    list_checkpoints,
    read_state,
    step_of,
)
from uptrain.distributed.collectives import gather, on_main

UNFINISHED, REMOVED = ".unfinished-", ".removed-"
_NFS_SECONDS = 60
"""The longest time that a client of NFS remembers, by default, that a folder was missing (nfs(5), `acdirmax`)."""


class SaveError(OSError):
    """Failure to write a checkpoint. Earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files match its manifest, and its state."""

    folder: Path
    state: State
    rejected: tuple[str, ...] = ()
    """Damage of newer checkpoints, one line each."""


class Checkpoints:
    """Checkpoints of one run. All methods are collective: every rank must call them."""

    def __init__(self, folder: Path, accelerator: Accelerator, keep_last: int) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self._keep_last = keep_last
        self._damaged: list[Path] = []

    def clean_up(self) -> None:
        """Make the folder, and remove leftovers of a killed save or rotation.

        Raises InputError on all ranks if one of them does not find the folder.
        """
        on_main(self._accelerator, self._remove_leftovers)
        if not all(gather(self._accelerator, _appears(self.folder))):
            raise InputError(
                f"not every process finds {self.folder}; put the run into a folder that all machines share."
            )

    def _remove_leftovers(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            prefix, name = path.name[: path.name.find("step-")], path.name[path.name.find("step-") :]
            if prefix in (UNFINISHED, REMOVED) and step_of(name) is not None:
                shutil.rmtree(path, ignore_errors=True)  # what is being read on a network disk goes at a later start

    def save(self, loss_module: nn.Module, optimizer: torch.optim.Optimizer, state: State, keep: bool = False) -> None:
        """Write the checkpoint of `state["step"]`; `keep` exempts it from rotation.

        Raises SaveError on all ranks if any of them failed, with the existing checkpoints unchanged.
        """
        final = self.folder / folder_name(state["step"])
        unfinished = self.folder / (UNFINISHED + final.name)
        try:
            with self._raising_together():
                self._begin(unfinished)
            with self._raising_together():
                _write_tensors(unfinished / TENSORS, loss_module, optimizer)
            self._finish(unfinished, final, {**state, "keep": keep})
            self._damaged = [folder for folder in self._damaged if folder != final]
        except SaveError:
            on_main(self._accelerator, lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise

    def rotate(self, newest: int) -> str:
        """Remove checkpoints before step `newest`, except the last `keep_last` and the last one marked to keep.

        Return an error, or "". Some network file systems do not remove a file while it is read; the next start removes
        it then.
        """
        return on_main(self._accelerator, lambda: self._rotate(newest))

    @contextmanager
    def _raising_together(self) -> Iterator[None]:
        """Raise SaveError on all ranks if the block raises OSError on any of them."""
        message = ""
        try:
            yield
        except OSError as error:
            message = str(error) or repr(error)
        messages = [each for each in gather(self._accelerator, message) if each]
        if messages:
            raise SaveError(messages[0])

    def _begin(self, unfinished: Path) -> None:
        """Make the temporary folder, on the main process. Raises OSError, also if the disk has too little space."""
        if not self._accelerator.is_main_process:
            return
        shutil.rmtree(unfinished, ignore_errors=True)
        last = list(list_checkpoints(self.folder).values())[-1:]
        required = SPARE * sum(f.stat().st_size for folder in last for f in folder.rglob("*") if f.is_file())
        free = shutil.disk_usage(self.folder).free
        if free < required:
            raise SaveError(f"{free:,} bytes are free, but a checkpoint needs {required:,.0f}")
        unfinished.mkdir(parents=True)

    def _finish(self, unfinished: Path, final: Path, state: State) -> None:
        """Sync the files and compute their checksums; then write state and manifest, and rename the folder."""
        with self._raising_together():
            sums = self._sync_and_sum(unfinished)
        all_sums = gather(self._accelerator, sums)
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

    def _rotate(self, newest: int) -> str:
        # Checkpoints after `newest` are damaged, and are written again: they do not count.
        try:
            steps = [step for step in list_checkpoints(self.folder) if step <= newest]
            for damaged in self._damaged:  # they must not take the place of a whole one
                if damaged.exists():
                    _remove(damaged)
                steps = [step for step in steps if folder_name(step) != damaged.name]
            kept = [step for step in steps if is_kept(self.folder / folder_name(step))]
            for step in steps[: -self._keep_last]:
                if step not in kept[-1:]:  # `extend` copies one, which is of no use once the longer run has its own
                    _remove(self.folder / folder_name(step))
        except OSError as error:
            return str(error)
        return ""

    def newest(self) -> VerifiedCheckpoint | None:
        """Return the newest intact checkpoint; None if there is no checkpoint.

        Raises InputError if all checkpoints are damaged.
        """
        rejected: list[str] = []
        for folder in on_main(self._accelerator, lambda: [*reversed(list_checkpoints(self.folder).values())]):
            damage = self.verify(folder)
            if not damage:
                try:
                    return VerifiedCheckpoint(folder, read_state(folder), tuple(rejected))
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

        Raises RunError on all ranks if one of them cannot read a file that is there.
        """
        damage = unreadable = ""
        try:
            damage = find_damage(folder, self._accelerator.process_index, self._accelerator.num_processes)
        except OSError as error:
            unreadable = str(error)
        found = gather(self._accelerator, (damage, unreadable))
        if problem := next((problem for _, problem in found if problem), ""):
            raise RunError(f"a file of {folder} cannot be read ({problem}); try again when its disk can be read.")
        return next((damage for damage, _ in found if damage), "")


def _appears(folder: Path) -> bool:
    """Return whether a folder that another process has made appears within _NFS_SECONDS."""
    deadline = time.monotonic() + _NFS_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint atomically: rename it first."""
    removed = checkpoint.with_name(REMOVED + checkpoint.name)
    shutil.rmtree(removed, ignore_errors=True)  # of an earlier attempt
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
    if final.exists():  # damaged, or written again after resuming at an earlier step
        _remove(final)
    unfinished.rename(final)
    sync_folder(final.parent)


def _write_tensors(folder: Path, loss_module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the tensors of this rank. Raises OSError."""
    tensors: State = {"model": _trained_tensors(loss_module)}
    if optimizer.state:  # empty if all steps so far were skipped
        tensors["optimizer"] = get_optimizer_state_dict(loss_module, optimizer)
    try:
        with _quiet(), _without_zip_checksums():
            # One thread: errors of further ones, such as a full disk, would be lost (torch 2.13).
            save_tensors(tensors, storage_writer=_Writer(folder, sync_files=False), no_dist=not dist.is_initialized())
    except CheckpointException as error:  # a BaseException
        raise SaveError("; ".join(str(failure) for failure, _ in error.failures.values())) from error


class _Writer(FileSystemWriter):
    """Raises the OSError behind torch's own error, such as that of a full disk; torch would lose it between ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from error


def _trained_tensors(loss_module: nn.Module) -> State:
    """Return the state dict without frozen parameters, which do not change: they stay in the model's own files."""
    parameters = loss_module.named_parameters(remove_duplicate=False)
    frozen = {name.removeprefix("module.") for name, parameter in parameters if not parameter.requires_grad}
    return {name: tensor for name, tensor in get_model_state_dict(loss_module).items() if name not in frozen}


def load(folder: Path, loss_module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's tensors into a model and optimizer, with any world size.

    Raises InputError if they do not match, or are not in the format of torch.distributed.checkpoint.
    """
    reader = _Reader(folder / TENSORS)
    tensors: State = {"model": _trained_tensors(loss_module)}
    has_optimizer = any(name.startswith("optimizer.") for name in reader.read_metadata().state_dict_metadata)
    if has_optimizer:
        tensors["optimizer"] = get_optimizer_state_dict(loss_module, optimizer)
    try:
        with _quiet():
            load_tensors(tensors, storage_reader=reader, planner=_Planner(), no_dist=not dist.is_initialized())
    except CheckpointException as error:  # a BaseException
        reasons = "; ".join(dict.fromkeys(str(failure) for failure, _ in error.failures.values()))
        raise InputError(f"{folder} does not fit the run's model and optimizer: {reasons}") from error
    # Not strict, because frozen tensors are absent. `load_tensors` has refused a checkpoint that lacks a trained one.
    set_model_state_dict(loss_module, tensors["model"], options=StateDictOptions(strict=False))
    if has_optimizer:
        set_optimizer_state_dict(loss_module, optimizer, tensors["optimizer"])


class _Reader(FileSystemReader):
    """Reader of torch, with our own parser of the metadata, which torch would unpickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, rebuilt from names, numbers and dtypes. Raises CheckpointError if it holds more."""
        metadata = read_metadata(Path(self.path) / METADATA)
        places: dict[MetadataIndex, _StorageInfo] = {}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in metadata.tensors.items():
            dtype = getattr(torch, entry.dtype)
            chunks = [ChunkStorageMetadata(torch.Size(c.start), torch.Size(c.shape)) for c in entry.chunks]
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks)
            places |= {MetadataIndex(name, torch.Size(c.start)): _storage_info(c.place) for c in entry.chunks}
        for name, place in metadata.non_tensors.items():
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _storage_info(place)
        return Metadata(entries, storage_data=places)


def _storage_info(place: Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.offset, place.length)


class _Planner(DefaultLoadPlanner):
    """Planner of torch, which would unpickle values that are no tensors, with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            torch.load(value, weights_only=True),
        )


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Disable torch's checksum of each tensor, a third of the time to save; the manifest has one of each file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
