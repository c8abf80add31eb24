"""Locate the tensors in files that `torch.save` wrote, without running code or loading a tensor.

Since torch 1.6 such a file is a zip archive without compression: `NAME/data.pkl` describes the tensors, and the files
`NAME/data/0`, `NAME/data/1`, … hold the bytes of their storages. torch reads the description (`weights_only=True`, so
that the pickle cannot run code); the directory of the archive gives the position of each storage. Together they give
every tensor as a view of the mapped file, and most tensors as a contiguous range of bytes.
"""

import io
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  registers bfloat16 and the 8-bit floats with numpy
import numpy as np

from model.checkpoint.formats.pickles import check_pickle
from model.checkpoint.hf_folder import refuse_lfs_pointer
from model.checkpoint.tensor import Array, Span, numpy_dtype
from model.common import checks
from model.common.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""torch's names of dtypes → the safetensors format's. Complex and quantised dtypes are not supported."""

TORCH_READER_BYTES = 150_000_000
"""Anonymous memory of a reader that imports torch (measured with torch 2.13: 130 MB)."""

_ZIP_ERRORS = (
    zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OverflowError, struct.error,
)  # fmt: skip
"""The errors that zipfile raises for a damaged archive."""

MAX_FILE_BYTES = {"data.pkl": 100_000_000, "byteorder": 16}
"""Largest number of bytes of the files in an archive that are read whole. Real descriptions have up to about 10 MB."""

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80\x02"
"""The first bytes of an archive, and of the format before: a pickle of protocol 2."""


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in a file."""

    dtype: str
    array: Array
    """A view of the mapped file. Dtypes that numpy lacks are viewed as unsigned integers of the same size."""
    span: Span | None
    """The contiguous range of the tensor's bytes; None for a transposed or otherwise strided tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


def read_tensors(path: Path) -> dict[str, PickledTensor]:
    """Return the tensors of a file that holds a `dict` of tensors by name.

    Raises CheckpointError if the file holds anything else or is damaged, or if torch is not installed.
    """
    size = path.stat().st_size
    _check_start(path)
    with path.open("rb") as file:
        places = read_places(path, file)
    content = load(path, path, mmap=True, map_location="cpu")
    tensors = dict(_named_tensors(path, content))
    offsets = _storage_offsets(path, tensors, places)
    data = np.memmap(path, np.uint8, mode="r", shape=(size,))
    storages = {name: offsets.get(t.untyped_storage().data_ptr(), 0) for name, t in tensors.items()}
    return {name: _view(path, tensor, data, storages[name]) for name, tensor in tensors.items()}


def read_piece(path: Path, data: Array, offset: int, length: int) -> PickledTensor:
    """Return the single tensor that `torch.save` wrote into `length` bytes of a mapped file.

    Raises CheckpointError if the bytes hold anything else.
    """
    window = _Window(data[offset : offset + length])
    if len(window.data) < length:
        raise damaged(path, f"it ends before byte {offset + length:,}")
    places = [place for place in read_places(path, window).values() if place[1]]
    window.seek(0)
    tensor = _checked(path, "a piece", load(path, window, map_location="meta"), "meta")
    if [size for _, size in places] != [tensor.untyped_storage().nbytes()] * min(tensor.numel(), 1):
        raise damaged(path, "a tensor in it does not fill the data it holds")
    return _view(path, tensor, data, offset + places[0][0] if places else 0)


class _Window(io.RawIOBase):
    """A range of a mapped file with the interface of a file."""

    def __init__(self, data: Array) -> None:
        self.data = data.data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self.data)}[whence]
        if self._position < 0:
            raise ValueError("an offset before the beginning")
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self.data[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def _check_start(path: Path) -> None:
    refuse_lfs_pointer(path)
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == _PICKLE:
        raise CheckpointError(
            f"{path} is in the format of torch before 1.6, which cannot be read piece by piece; copy its folder, and "
            "save it there again: torch.save(torch.load(FILE, weights_only=True), COPY)."
        )
    if start != _ZIP:
        raise CheckpointError(f"{path} is not a file that torch.save wrote, or is damaged: it is not a zip archive.")


def read_places(path: Path, file: io.BufferedIOBase | io.RawIOBase) -> dict[str, tuple[int, int]]:
    """Return the position of each storage in an archive as (offset, size), by the storage's number.

    Raises CheckpointError if the archive is truncated, damaged or not from `torch.save`.
    """
    try:
        end, entries = file.seek(0, io.SEEK_END), zipfile.ZipFile(file).infolist()
        places = {entry.filename: (_data_offset(file, entry), entry.file_size) for entry in entries}
        for name, (offset, size) in places.items():
            if offset + size > end or size > MAX_FILE_BYTES.get(name.rpartition("/")[2], end):
                raise zipfile.BadZipFile(f"its directory gives {checks.short_repr(name)} {size:,} bytes")
        roots = [name.removesuffix("data.pkl") for name in places if name.endswith("/data.pkl")]
        if len(roots) != 1 or len(places) != len(entries):
            raise zipfile.BadZipFile("it holds other files than torch.save writes")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise zipfile.BadZipFile("its files are compressed, which torch.save never does")
    except _ZIP_ERRORS as error:
        raise damaged(path, error) from error
    offset, size = places[f"{roots[0]}data.pkl"]
    file.seek(offset)
    try:
        check_pickle(file.read(size) or b"")
    except Exception as error:  # pickletools raises many kinds
        raise damaged(path, error) from error
    offset, size = places.get(f"{roots[0]}byteorder", (0, 0))
    file.seek(offset)
    if size and file.read(size) != sys.byteorder.encode():
        raise CheckpointError(f"{path} was written on a machine of the other byte order; save it again on this one.")
    prefix = f"{roots[0]}data/"
    return {name.removeprefix(prefix): place for name, place in places.items() if name.startswith(prefix)}


def _data_offset(file: io.BufferedIOBase | io.RawIOBase, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an archived file's data: after its local header, whose last two numbers are lengths."""
    if entry.header_offset < 0:
        raise zipfile.BadZipFile(f"its directory places {entry.filename} before its beginning")
    file.seek(entry.header_offset)
    header = file.read(30)
    if header is None or len(header) < 30 or header[:4] != _ZIP:
        raise zipfile.BadZipFile(f"there is no {entry.filename} where its directory says")
    return entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def damaged(path: Path, error: Exception | str) -> CheckpointError:
    """Return the CheckpointError for a damaged file."""
    reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    return CheckpointError(f"{path} is truncated or damaged, or not a file that torch.save wrote: {reason}.")


def load(path: Path, source: Any, **options: Any) -> Any:
    """Call `torch.load(source, weights_only=True)`, with errors as CheckpointError; `path` is only for messages."""
    import warnings

    try:
        import torch
    except ImportError as error:
        raise CheckpointError(f"{path} can be read with torch only; install it: pip install torch.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a bad file also raises an error
            return torch.load(source, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        global_name = re.search(r"GLOBAL (\S+)", str(error))
        if not global_name:
            raise damaged(path, str(error).rpartition("WeightsUnpickler error: ")[2]) from error
        raise CheckpointError(
            f"{path} holds {global_name[1]}, which is code or an object and not a tensor; no code was run. Ask for the "
            "model as safetensors, or save only its state dict."
        ) from error
    except Exception as error:  # for a damaged file torch raises any error, even KeyError and AssertionError
        raise damaged(path, error) from error


def _named_tensors(path: Path, content: Any) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield the tensors of a loaded file. Raises CheckpointError at the first value that is not a tensor."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict of tensors by name.")
    for name, value in content.items():
        check_name(path, name)
        yield name, _checked(path, name, value, "cpu")


def check_name(path: Path, name: Any) -> None:
    """Raise CheckpointError for a name that a safetensors file cannot hold."""
    if not isinstance(name, str) or name == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise CheckpointError(f"{path} holds {checks.short_repr(name)}, which cannot be the name of a tensor.")


def _checked(path: Path, name: str, value: Any, device: str) -> "torch.Tensor":
    """Return `value` if it is a tensor that can be viewed in its file. Raises CheckpointError otherwise."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{path} holds {checks.short_repr(name)}, which is a {type(value).__name__} and not a tensor; "
            "save the model's state dict alone."
        )
    if value.is_nested or vars(value):  # an attribute could take the place of a method
        raise CheckpointError(
            f"{path} holds {checks.short_repr(name)} as a nested tensor or with attributes "
            f"({checks.short_repr(list(vars(value)))}); save plain tensors (`.detach()`)."
        )
    if prod(n for n in value.shape if n) >= checks.MAX_COUNT:  # numpy makes no such array, even if it is empty
        raise CheckpointError(f"{path} holds {name} of the impossible shape {tuple(value.shape)}; it is damaged.")
    if value.is_neg() or value.is_conj():
        raise CheckpointError(f"{path} holds {name} as a negated view; save the tensor itself (`.resolve_neg()`).")
    if value.layout != torch.strided or value.device.type != device or dtype_name(value) not in DTYPES:
        raise CheckpointError(
            f"{path} holds {name} as a tensor of {dtype_name(value)}, {value.layout}, on {value.device}; "
            f"supported are plain ones of {', '.join(DTYPES)}."
        )
    return value


def dtype_name(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _storage_offsets(
    path: Path, tensors: Mapping[str, "torch.Tensor"], places: Mapping[str, tuple[int, int]]
) -> dict[int, int]:
    """Return the file offset of each storage, by its address in torch's mapping of the file.

    torch does not expose the address of the mapping. Addresses and offsets are paired in sorted order; their
    difference must then be the same for every storage.
    """
    storages = {(s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors.values()) if s.nbytes()}
    addresses, offsets = sorted(storages), sorted(place for place in places.values() if place[1])
    if [size for _, size in addresses] != [size for _, size in offsets]:
        raise damaged(path, "its tensors do not fill the data it holds")
    offset_of = {address: offset for (address, _), (offset, _) in zip(addresses, offsets, strict=True)}
    if len({address - offset for address, offset in offset_of.items()}) > 1:
        raise damaged(path, "its tensors lie elsewhere than its directory says")
    return offset_of


def _view(path: Path, tensor: "torch.Tensor", data: Array, storage: int) -> PickledTensor:
    """Return a view of the tensor whose storage begins at byte `storage` of a mapped file."""
    dtype = DTYPES[dtype_name(tensor)]
    kind = numpy_dtype(dtype)
    if not tensor.numel():
        return PickledTensor(dtype, np.empty(tensor.shape, kind), Span(path, 0, 0))
    start = storage + int(tensor.storage_offset()) * kind.itemsize
    strides = tuple(n * kind.itemsize for n in tensor.stride())
    try:
        array: Array = np.ndarray(tuple(tensor.shape), kind, data, start, strides)
    except ValueError as error:  # numpy raises it for a view beyond its buffer
        raise damaged(path, error) from error
    return PickledTensor(dtype, array, Span(path, start, array.nbytes) if array.flags.c_contiguous else None)
