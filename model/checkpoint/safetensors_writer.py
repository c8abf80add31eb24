"""Write safetensors shards in pieces, in any order, from several threads at once.

A shard's header is written first and fixes the position of every tensor. Spans of the source are then copied to their
position inside the kernel, and computed tensors are written a few rows at a time.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from model.checkpoint.hf_folder import SINGLE
from model.checkpoint.interface import Shard
from model.checkpoint.tensor import Array, Span, TensorInfo
from model.common.typed_json import json_bytes

# Errors of an unsupported copy_file_range (other file system, old kernel, sandbox; EIO on CIFS). Data is then read and
# written, which fails again if the disk has failed.
_NOT_IN_KERNEL = {errno.EIO, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF}
_COPY_BYTES = 1 << 20
"""Bytes that are copied at a time outside the kernel."""
DEFAULT_SHARD_SIZE = 5_000_000_000
"""Most bytes of a shard, as in transformers 4."""


def header_bytes(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a shard before its data. Metadata always has `format: pt`, which transformers 4 requires."""
    header: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8, so that readers can map it
    return len(text).to_bytes(8, "little") + text


class ShardFile:
    """An output shard. The position of each tensor is fixed, so several threads can call the methods."""

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> None:
        start = header_bytes(tensors, metadata)
        self._offsets = {}
        position = len(start)
        for tensor in tensors:
            self._offsets[tensor.name] = position
            position += tensor.nbytes
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        _write_all(self._descriptor, start, 0)

    def copy(self, name: str, start: int, span: Span) -> None:
        """Copy `span` to byte `start` of the tensor `name`. It may extend into the tensors that follow."""
        copy_span(span, self._descriptor, self._offsets[name] + start)

    def write_rows(self, name: str, row: int, rows: Array) -> None:
        """Write `rows` into the tensor, starting at row `row`."""
        offset = self._offsets[name] + row * (rows.nbytes // max(len(rows), 1))
        _write_all(self._descriptor, np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data, offset)

    def finish(self, keep_cached: bool = True) -> None:
        """Flush the shard to the disk, and close it. Without `keep_cached`, the kernel drops it from its page cache."""
        os.fsync(self._descriptor)
        if not keep_cached and hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()

    def close(self) -> None:
        """Close the shard without flushing it, unless it is closed already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(descriptor, view, offset)
        view, offset = view[n:], offset + n


def copy_span(span: Span, target: int, offset: int) -> None:
    """Copy a span into an open file, inside the kernel if possible (Btrfs, XFS and others then share the blocks)."""
    source = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
    buffer = None
    try:
        done, in_kernel = 0, hasattr(os, "copy_file_range")
        while done < span.length:
            n = 0
            if in_kernel:
                n, in_kernel = _kernel_copy(source, target, span.length - done, span.offset + done, offset + done)
            if n == 0:
                buffer = buffer or memoryview(bytearray(min(span.length, _COPY_BYTES)))
                n = os.preadv(source, [buffer[: span.length - done]], span.offset + done)
                if n == 0:
                    raise OSError(f"{span.path} became shorter while it was read")
                _write_all(target, buffer[:n], offset + done)
            done += n
    finally:
        os.close(source)


def _kernel_copy(source: int, target: int, count: int, source_offset: int, offset: int) -> tuple[int, bool]:
    """Return the number of bytes copied, and whether to call the kernel again."""
    try:
        n = os.copy_file_range(source, target, count, source_offset, offset)
    except OSError as error:
        if error.errno in _NOT_IN_KERNEL:
            return 0, False
        raise
    return n, n > 0


def divide(tensors: Iterable[TensorInfo], max_shard_size: int) -> list[list[TensorInfo]]:
    """Divide tensors, in order, into shards of at most `max_shard_size` bytes. A larger tensor gets its own shard."""
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def name_shards(groups: Sequence[Sequence[TensorInfo]], metadata: Mapping[str, str]) -> tuple[Shard, ...]:
    """Return shards with transformers' names: `model.safetensors`, or `model-00001-of-00003.safetensors`."""
    n = len(groups)
    names = [SINGLE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    return tuple(Shard(name, tuple(t.name for t in group), metadata) for name, group in zip(names, groups, strict=True))


def index_bytes(shards: Sequence[Shard], tensors: Mapping[str, TensorInfo]) -> bytes | None:
    """Return `model.safetensors.index.json`, or None for a single `model.safetensors`, which must not have an index."""
    if [shard.name for shard in shards] == [SINGLE]:
        return None
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    total = sum(tensors[name].nbytes for name in weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json_bytes(index)
