"""Write and read the tensors of a training checkpoint, in the format of torch.distributed.checkpoint.

The metadata is a pickle, and runs may be untrusted. Our own reader parses it without executing code, and passes the
result to torch.

Frozen parameters are not part of a checkpoint. They are in the files of the model that the run began with.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
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

from model.checkpoint.formats.dcp.metadata import METADATA, FileRange, read_metadata
from model.common.errors import InputError
from model.files.read import check_regular
from uptrain.checkpoints.files import TENSORS

StateDict = dict[str, Any]
"""Tensors by name, or state dicts by `model` and `optimizer`, as torch.distributed.checkpoint takes them."""


class SaveError(OSError):
    """Failure to write a checkpoint. Earlier checkpoints are unchanged."""


def write_tensors(folder: Path, loss_module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the tensors of this rank. Raises OSError."""
    tensors: StateDict = {"model": _trained_tensors(loss_module)}
    if optimizer.state:  # empty if all steps so far were skipped
        tensors["optimizer"] = get_optimizer_state_dict(loss_module, optimizer)
    try:
        with _quiet(), _without_zip_checksums():
            # One thread: errors of further ones, such as a full disk, would be lost (torch 2.13).
            save_tensors(tensors, storage_writer=_Writer(folder, sync_files=False))
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


def _trained_tensors(loss_module: nn.Module) -> StateDict:
    """Return the state dict without frozen parameters, which do not change: they stay in the model's own files."""
    parameters = loss_module.named_parameters(remove_duplicate=False)
    frozen = {name.removeprefix("module.") for name, parameter in parameters if not parameter.requires_grad}
    return {name: tensor for name, tensor in get_model_state_dict(loss_module).items() if name not in frozen}


def read_tensors(folder: Path, loss_module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's tensors into a model and optimizer, with any world size.

    Raises InputError if they do not match, or are not in the format of torch.distributed.checkpoint.
    """
    reader = _Reader(folder / TENSORS)
    tensors: StateDict = {"model": _trained_tensors(loss_module)}
    has_optimizer = any(name.startswith("optimizer.") for name in reader.read_metadata().state_dict_metadata)
    if has_optimizer:
        tensors["optimizer"] = get_optimizer_state_dict(loss_module, optimizer)
    try:
        with _quiet():
            load_tensors(tensors, storage_reader=reader, planner=_Planner())
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
        folder = Path(self.path)
        metadata = read_metadata(folder / METADATA)
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
        for path in {folder / place.relative_path for place in places.values()}:
            if path.exists():
                check_regular(path)  # opening a FIFO would block
        return Metadata(entries, storage_data=places)


def _storage_info(place: FileRange) -> _StorageInfo:
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
