"""Read safetensors headers, and Hugging Face folders with one safetensors file or shards and an index.

The format (safetensors README, "Format"): 8 bytes little-endian header length N, N bytes of JSON that map each tensor
name to `{"dtype", "shape", "data_offsets": [begin, end]}` (offsets from the end of the header), then the data, without
gaps. The header is parsed here because the library does not expose the byte ranges, which copying needs.
"""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from model.checkpoint import hf_folder
from model.checkpoint.interface import Checkpoint, FileVersion, Shard, file_version
from model.checkpoint.shard_index import SAFETENSORS, check_index, weight_file_names
from model.checkpoint.tensor import BITS, Array, Span, TensorInfo, numpy_dtype
from model.common import checks
from model.common.checks import MAX_COUNT
from model.common.errors import CheckpointError
from model.files.read import parse_json

MAX_HEADER, MAX_AXES = 100_000_000, 64
_OPENING = Lock()
"""Several threads may read the first rows of a file at once."""


@dataclass(frozen=True)
class Header:
    """A parsed header: the tensors in file order, and the byte offset of each in the file."""

    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]
    metadata: dict[str, str]
    version: FileVersion


def read_header(path: Path) -> Header:
    """Read and check a safetensors header. Raises CheckpointError for anything that the format does not allow."""
    hf_folder.refuse_lfs_pointer(path)
    with path.open("rb") as file:
        version = file_version(os.fstat(file.fileno()))
        size = version[0]
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER or 8 + length > size:
            raise CheckpointError(f"{path} is not a safetensors file, or is truncated: its header does not fit in it.")
        text = file.read(length)
    try:
        if not text.startswith(b"{"):  # but with a byte-order mark or a space, which other readers refuse
            raise ValueError("it does not begin with {")
        entries = parse_json(text, _unique_keys)
        metadata = entries.pop("__metadata__", None) or {}
        header = Header(*_parse(entries, metadata, data_start=8 + length), metadata, version)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {error}.") from error
    end = max((header.offsets[n] + t.nbytes for n, t in header.tensors.items()), default=8 + length)
    if end != size:
        fault = "truncated" if size < end else "followed by bytes that belong to no tensor"
        raise CheckpointError(f"{path} is {fault}: its header describes {end:,} bytes, the file has {size:,}.")
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _parse(
    entries: dict[str, Any], metadata: dict[str, str], data_start: int
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Return the tensors in file order, and the byte offset of each in the file."""
    if not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ holds something other than text")
    for text in (*metadata, *metadata.values()):
        text.encode()  # raises for halves of a surrogate pair, which a file cannot hold
    tensors, offsets, position = {}, {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in BITS:
            raise ValueError(f"tensor {checks.short_repr(name)} has the unknown dtype {checks.short_repr(dtype)}")
        # The order counts: a product of numbers without a limit would take hours.
        if (
            len(shape) > MAX_AXES
            or not all(checks.is_whole_number(n, least=0) and n <= MAX_COUNT for n in shape)
            or prod(n for n in shape if n) >= MAX_COUNT  # numpy makes no such array, not even an empty one
        ):
            raise ValueError(f"tensor {checks.short_repr(name)} has the impossible shape {checks.short_repr(shape)}")
        tensor = TensorInfo(name, dtype, shape)
        if type(begin) is not int or type(end) is not int:
            raise ValueError(f"tensor {checks.short_repr(name)} has offsets that are not whole numbers")
        name.encode()  # raises for names that a file cannot hold
        if begin != position or end - begin != tensor.nbytes or prod(shape) * BITS[dtype] % 8:
            place = f"{checks.short_repr(begin)} to {checks.short_repr(end)}"
            raise ValueError(
                f"tensor {checks.short_repr(name)} lies at bytes {place}, which does not fit its shape or neighbours"
            )
        tensors[name], offsets[name], position = tensor, data_start + begin, end
    return tensors, offsets


class SafetensorsFolder(Checkpoint):
    """A Hugging Face folder with `model.safetensors`, or shards and their index."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        hf_folder.refuse_adapter(path)
        self.path = path
        self.config_bytes, self.config = hf_folder.read_config(path)
        names, table = weight_file_names(path, SAFETENSORS)
        self.weight_files = tuple(path / name for name in names)
        self.side_files, skipped_files = hf_folder.list_files(path)
        self.skipped_files = tuple(name for name in skipped_files if name not in (*names, SAFETENSORS.index))
        headers = {file.name: read_header(file) for file in self.weight_files}
        check_index(path / SAFETENSORS.index, {file: header.tensors for file, header in headers.items()}, table)
        self.opened = {file: headers[file.name].version for file in self.weight_files}
        self.shards = tuple(Shard(name, tuple(h.tensors), h.metadata) for name, h in headers.items())
        self.tensors = {t.name: t for h in headers.values() for t in h.tensors.values()}
        self._spans = {
            name: Span(file, header.offsets[name], tensor.nbytes)
            for file, header in zip(self.weight_files, headers.values(), strict=True)
            for name, tensor in header.tensors.items()
        }
        self._descriptors: dict[Path, int] = {}

    def span(self, name: str) -> Span:
        return self._spans[name]

    def rows(self, name: str, start: int, stop: int) -> Array:
        tensor, span = self.tensors[name], self._spans[name]
        dtype = numpy_dtype(tensor.dtype)
        shape = (stop - start, *tensor.shape[1:])
        out = np.empty(shape, dtype)
        offset = span.offset + start * prod(shape[1:]) * dtype.itemsize
        read_exactly(self._descriptor(span.path), out.reshape(-1).view(np.uint8).data, offset, span.path)
        return out

    def _descriptor(self, path: Path) -> int:
        with _OPENING:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def read_exactly(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from byte `offset` of a file. Raises OSError if the file ends too early."""
    done = 0
    while done < len(buffer):
        n = os.preadv(descriptor, [buffer[done:]], offset + done)
        if n == 0:
            raise OSError(f"{path} became shorter while it was read")
        done += n


def matches(path: Path) -> bool:
    return path.is_dir() and SAFETENSORS.is_in(path)


def read(path: Path) -> Checkpoint:
    return SafetensorsFolder(path)
