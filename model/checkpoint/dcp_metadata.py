"""`.metadata` of a torch.distributed.checkpoint: which tensors there are, and which bytes of which file hold them.

The file is a pickle, which could run anything when opened as such. Here the few classes that torch writes are stood for
by plain records, and every other name in it is refused before it is looked up.
"""

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.folder import is_plain_name
from model.checkpoint.torch_file import DTYPES
from model.errors import CheckpointError

FILE = ".metadata"


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor: where it belongs, and the bytes of the file that `torch.save` wrote of it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint; `dtype` in torch's words."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class _Record:
    """Stands for an object of torch's: keeps what it is made of, and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.values = state


class _TensorEntry(_Record):
    """Stands for TensorStorageMetadata."""


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (_CHECKPOINT, name): _Record
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "_MEM_FORMAT_ENCODING",
        )
    },
    (_CHECKPOINT, "TensorStorageMetadata"): _TensorEntry,
    # Where torch before 2.3 has them:
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Record,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    # How Python 3.11.0 to 3.11.3 name a member of an enum; nothing is looked up here.
    ("builtins", "getattr"): _Record,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "WindowsPath"): _Record,
    **{("torch", name): name for name in (*DTYPES, "complex64", "complex128")},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _UnknownNameError(f"{module}.{name}")
        return _KNOWN[module, name]


class _UnknownNameError(Exception):
    """A pickle names something that no such file needs."""


def read_metadata(path: Path) -> dict[str, Entry]:
    """Return the tensors by name; other things that were saved are passed over.

    Raises CheckpointError if the file is damaged, or is a pickle of anything else.
    """
    try:
        with path.open("rb") as file:
            return _entries(_Unpickler(file).load())
    except _UnknownNameError as error:
        raise CheckpointError(
            f"{path} holds {error}, which no torch.distributed.checkpoint needs; nothing of it was run."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle is met with all kinds of errors
        raise CheckpointError(
            f"{path} is damaged, or not a torch.distributed.checkpoint's: {type(error).__name__}."
        ) from error


def _entries(metadata: _Record) -> dict[str, Entry]:
    places = {
        (index.fqn, tuple(index.offset)): info
        for index, info in metadata.storage_data.items()  # type: ignore[attr-defined]
        if getattr(index, "offset", None) is not None
    }
    return {
        name: _entry(name, entry, places)
        for name, entry in metadata.state_dict_metadata.items()  # type: ignore[attr-defined]
        if isinstance(name, str) and isinstance(entry, _TensorEntry)
    }


def _entry(name: str, entry: Any, places: dict[tuple[str, tuple[int, ...]], Any]) -> Entry:
    properties = entry.properties
    dtype = properties.values[0] if properties.values else properties.dtype
    chunks = tuple(_chunk(name, chunk, places[name, tuple(chunk.offsets)]) for chunk in entry.chunks)
    _check_numbers(*entry.size)
    return Entry(str(dtype), tuple(entry.size), chunks)


def _chunk(name: str, chunk: Any, info: Any) -> Chunk:
    file, transforms = info.relative_path, getattr(info, "transform_descriptors", None)
    if transforms:
        raise CheckpointError(f"{name} was written compressed ({transforms}), which is not supported.")
    if not is_plain_name(file):
        raise CheckpointError(f"it names the file {file!r}, a path outside the folder or no file's name; refused.")
    _check_numbers(*chunk.offsets, *chunk.sizes, info.offset, info.length)
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, info.offset, info.length)


def _check_numbers(*numbers: Any) -> None:
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("what should count something does not")
