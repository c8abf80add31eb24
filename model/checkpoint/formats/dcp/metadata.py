"""`.metadata` of a torch.distributed.checkpoint: which tensors there are, and which bytes of which file hold them.

The file is a pickle, which could run anything when opened as such. Here the few classes that torch writes are stood for
by plain records, and every other name in it is refused before it is looked up.
"""

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.torch_file import DTYPES
from model.common.errors import CheckpointError
from model.common.files import is_plain_name

FILE = ".metadata"


@dataclass(frozen=True)
class Place:
    """Bytes of a file, in which `torch.save` wrote something."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor: where it belongs, and where it is stored."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint; `dtype` in torch's words."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, by name."""

    tensors: dict[str, Entry]
    others: dict[str, Place]
    """Anything else, as the numbers of an optimizer's parameter groups."""


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


def read_metadata(path: Path) -> Contents:
    """Return what a checkpoint holds, and where.

    Raises CheckpointError if the file is damaged, or is a pickle of anything else.
    """
    try:
        with path.open("rb") as file:
            return _contents(_Unpickler(file).load())
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


def _contents(metadata: Any) -> Contents:
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        places[index.fqn, None if offset is None else tuple(offset)] = info
    tensors, others = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError("a name is no text")
        if isinstance(entry, _TensorEntry):
            tensors[name] = _entry(name, entry, places)
        elif (name, None) in places:
            others[name] = _place(name, places[name, None])
    return Contents(tensors, others)


def _entry(name: str, entry: Any, places: dict[tuple[str, tuple[int, ...] | None], Any]) -> Entry:
    properties = entry.properties
    dtype = properties.values[0] if properties.values else properties.dtype
    chunks = []
    for chunk in entry.chunks:
        start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        _check_numbers(*start, *shape)
        chunks.append(Chunk(start, shape, _place(name, places[name, start])))
    _check_numbers(*entry.size)
    return Entry(str(dtype), tuple(entry.size), tuple(chunks))


def _place(name: str, info: Any) -> Place:
    file, transforms = info.relative_path, getattr(info, "transform_descriptors", None)
    if transforms:
        raise CheckpointError(f"{name} was written compressed ({transforms}), which is not supported.")
    if not isinstance(file, str) or not is_plain_name(file):
        raise CheckpointError(f"it names the file {file!r}, a path outside the folder or no file's name; refused.")
    _check_numbers(info.offset, info.length)
    return Place(file, info.offset, info.length)


def _check_numbers(*numbers: Any) -> None:
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("what should count something does not")
