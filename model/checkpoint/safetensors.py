"""Safetensors: the file's header, and Hugging Face folders of one file or of shards with an index.

The format (safetensors README, "Format"): 8 bytes little-endian header length N, N bytes of JSON that map each tensor
name to `{"dtype", "shape", "data_offsets": [begin, end]}` (offsets from the end of the header), then the data, without
holes. We parse it ourselves because the library does not tell where a tensor's bytes lie, and copying needs that.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint import folder
from model.checkpoint.checkpoint import Checkpoint, Shard
from model.checkpoint.folder import INDEX, SINGLE
from model.checkpoint.tensor import BITS, FLOAT_DTYPES, Array, Span, Tensor
from model.errors import CheckpointError

MAX_HEADER = 100_000_000
LFS_POINTER = b"version https://git-lfs"
OTHER_WEIGHTS = ("pytorch_model*.bin", "consolidated.*", "*.gguf", "*.safetensors", "tf_model.h5", "flax_model.msgpack")


@dataclass(frozen=True)
class Header:
    """A parsed header: tensors with the byte offset of each in the file, in file order."""

    tensors: dict[str, Tensor]
    offsets: dict[str, int]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check a safetensors header. Raises CheckpointError on anything the format does not allow."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(8, len(LFS_POINTER)))
        if start.startswith(LFS_POINTER):
            raise CheckpointError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder.")
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > MAX_HEADER or 8 + length > size:
            raise CheckpointError(f"{path} is not a safetensors file, or is truncated: its header does not fit in it.")
        file.seek(8)
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_unique_keys)
        metadata = entries.pop("__metadata__", None) or {}
        header = _parse(entries, metadata, data_start=8 + length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {error}.") from error
    end = max((header.offsets[n] + t.nbytes for n, t in header.tensors.items()), default=8 + length)
    if end != size:
        what = "truncated" if size < end else "followed by bytes that belong to no tensor"
        raise CheckpointError(f"{path} is {what}: its header describes {end:,} bytes, the file has {size:,}.")
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _parse(entries: dict[str, Any], metadata: dict[str, str], data_start: int) -> Header:
    if not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ holds something other than text")
    tensors, offsets, position = {}, {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in BITS:
            raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"tensor {name!r} has the impossible shape {shape}")
        tensor = Tensor(name, dtype, shape)
        if type(begin) is not int or type(end) is not int:
            raise ValueError(f"tensor {name!r} has offsets that are not whole numbers")
        name.encode()  # refuses names that no file can hold
        if begin != position or end - begin != tensor.nbytes or prod(shape) * BITS[dtype] % 8:
            raise ValueError(
                f"tensor {name!r} lies at bytes {begin} to {end}, which does not fit its shape or neighbours"
            )
        tensors[name], offsets[name], position = tensor, data_start + begin, end
    return Header(tensors, offsets, metadata)


class SafetensorsFolder(Checkpoint):
    """A Hugging Face folder with `model.safetensors`, or shards and their index."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        folder.refuse_adapter(path)
        self.path = path
        self.config_text, self.config = folder.read_config(path)
        names, named_by_index = _weight_file_names(path)
        self.weight_files = tuple(path / name for name in names)
        self.side_files, left_out = folder.list_files(path)
        self.left_out = tuple(name for name in left_out if name not in (*names, INDEX))
        headers = {file.name: read_header(file) for file in self.weight_files}
        _check_index(path, headers, named_by_index)
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
        dtype = FLOAT_DTYPES[tensor.dtype]
        shape = (stop - start, *tensor.shape[1:])
        out = np.empty(shape, dtype)
        offset = span.offset + start * prod(shape[1:]) * dtype.itemsize
        read_exactly(self._descriptor(span.path), out.reshape(-1).view(np.uint8).data, offset, span.path)
        return out

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def read_exactly(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from `offset`; raises OSError if the file ends before."""
    done = 0
    while done < len(buffer):
        n = os.preadv(descriptor, [buffer[done:]], offset + done)
        if n == 0:
            raise OSError(f"{path} became shorter while it was read")
        done += n


def recognises(path: Path) -> bool:
    return path.is_dir()


def read(path: Path) -> Checkpoint:
    return SafetensorsFolder(path)


def _weight_file_names(path: Path) -> tuple[list[str], dict[str, str] | None]:
    """Return the weight files' names in order, and the index's tensor → file table where there is an index."""
    has_single, has_index = (path / SINGLE).is_file(), (path / INDEX).is_file()
    if not has_index:
        _refuse_dangling(path / SINGLE)
        if not has_single:
            raise CheckpointError(_no_weights(path))
        return [SINGLE], None
    table = _read_index(path / INDEX)
    names = sorted(set(table.values()))
    if has_single and SINGLE not in names:
        raise CheckpointError(f"{path} holds both {SINGLE} and {INDEX}, two models; remove the one that is stale.")
    for name in names:
        if Path(name).name != name or name in (".", ".."):
            raise CheckpointError(f"{path / INDEX} names {name!r}, which is a path outside the folder; refused.")
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{path / INDEX} names {name!r}, which is not a .safetensors file; refused.")
        _refuse_dangling(path / name)
        if not (path / name).is_file():
            raise CheckpointError(f"{path / INDEX} names the shard {name}, which is missing; download it again.")
    return names, table


def _refuse_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a dangling symlink to {path.readlink()}; fetch the file again.")


def _read_index(path: Path) -> dict[str, str]:
    try:
        table = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise TypeError("weight_map does not map tensor names to file names")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a shard index: {error}.") from error
    return table


def _check_index(path: Path, headers: dict[str, Header], table: dict[str, str] | None) -> None:
    """Check the index against the shards' headers, both ways."""
    if table is None:
        return
    found = {name: file for file, header in headers.items() for name in header.tensors}
    if sum(len(header.tensors) for header in headers.values()) != len(found):
        raise CheckpointError(f"{path}: the same tensor stands in two shards; the checkpoint is inconsistent.")
    for name, file in table.items():
        if found.get(name) != file:
            raise CheckpointError(f"{path / INDEX} puts the tensor {name} in {file}, which does not hold it.")
    for name, file in found.items():
        if name not in table:
            raise CheckpointError(f"{path / file} holds the tensor {name}, which {INDEX} does not name.")


def _no_weights(path: Path) -> str:
    others = sorted({f.name for pattern in OTHER_WEIGHTS for f in path.glob(pattern)})
    if not others:
        return f"{path} holds no weights: neither {SINGLE} nor {INDEX}."
    return (
        f"{path} holds neither {SINGLE} nor {INDEX}, only {', '.join(others[:3])}; "
        "save the model as safetensors first, or name a .gguf file itself."
    )
