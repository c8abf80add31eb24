"""Read `.metadata` of a torch.distributed.checkpoint: the list of its tensors, and the file ranges that hold them.

The file is a pickle, which could run any code when loaded. Here the few classes that torch writes are replaced by
plain records, and every other name in the pickle is refused before it is looked up.
"""

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from model.checkpoint.formats.pickles import check_pickle
from model.checkpoint.formats.torch_file import DTYPES
from model.common import checks
from model.common.errors import CheckpointError
from model.files.paths import is_plain_name
from model.files.read import read_bytes_up_to

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
"""Size limit of the file, which is read whole. It grows with the tensors and the ranks; real ones have up to 100 MB."""


@dataclass(frozen=True)
class FileRange:
    """A range of bytes in a file that `torch.save` wrote."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: its start index and shape in the tensor, and the file range that stores it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: FileRange


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint; `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint, by name."""

    tensors: dict[str, Entry]
    non_tensors: dict[str, FileRange]
    """Entries that are not tensors, such as the numbers of an optimizer's parameter groups."""


class _Record:
    """A replacement for a torch object. It stores the object's constructor arguments and state."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.values = state


class _TensorEntry(_Record):
    """A replacement for TensorStorageMetadata."""


def _size(numbers: Any = ()) -> tuple[int, ...]:
    """Replace torch.Size. (A size of sizes would take time that is exponential in its depth.)"""
    _check_numbers(*numbers)
    return tuple(numbers)


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
    # In torch before 2.3:
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Record,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    # Python 3.11.0 to 3.11.3 pickle a member of an enum by this name. Nothing is looked up here.
    ("builtins", "getattr"): _Record,
    ("torch", "Size"): _size,
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
    """A pickle contains a name that such a file does not need."""


def read_metadata(path: Path) -> Contents:
    """Return the content of a checkpoint.

    Raises CheckpointError if the file is damaged, or a pickle of anything else.
    """
    content = read_bytes_up_to(path, MAX_METADATA_BYTES)
    try:
        check_pickle(content)
        return _contents(_Unpickler(BytesIO(content)).load())
    except _UnknownNameError as error:
        raise CheckpointError(
            f"{path} holds {error}, which no torch.distributed.checkpoint needs; no code was run."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise any kind of error
        raise CheckpointError(
            f"{path} is damaged, or not a torch.distributed.checkpoint's: {type(error).__name__}."
        ) from error


def _contents(metadata: Any) -> Contents:
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        places[index.fqn, None if offset is None else tuple(offset)] = info
    tensors, non_tensors = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError("a name is not a string")
        if isinstance(entry, _TensorEntry):
            tensors[name] = _entry(name, entry, places)
        elif (name, None) in places:
            non_tensors[name] = _place(name, places[name, None])
    return Contents(tensors, non_tensors)


def _entry(name: str, entry: Any, places: dict[tuple[str, tuple[int, ...] | None], Any]) -> Entry:
    properties = entry.properties
    dtype = properties.values[0] if properties.values else properties.dtype
    if not isinstance(dtype, str):  # the text of nested lists takes time that is exponential in their depth
        raise TypeError("a dtype is not one of torch's")
    chunks = []
    for chunk in entry.chunks:
        start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        _check_numbers(*start, *shape)
        chunks.append(Chunk(start, shape, _place(name, places[name, start])))
    _check_numbers(*entry.size)
    return Entry(dtype, tuple(entry.size), tuple(chunks))


def _place(name: str, info: Any) -> FileRange:
    file, transforms = info.relative_path, getattr(info, "transform_descriptors", None)
    if transforms:
        words = ", ".join(word for word in transforms if isinstance(word, str))
        raise CheckpointError(f"{name} was written compressed ({words}), which is not supported.")
    if not isinstance(file, str):
        raise TypeError("the name of a file is not a string")
    if not is_plain_name(file):
        raise CheckpointError(
            f"it names the file {checks.short_repr(file)}, which is not a plain file name inside the folder; refused."
        )
    _check_numbers(info.offset, info.length)
    return FileRange(file, info.offset, info.length)


def _check_numbers(*numbers: Any) -> None:
    if not all(checks.is_whole_number(n, least=0) for n in numbers):
        raise ValueError("an offset or length is not a whole number")
