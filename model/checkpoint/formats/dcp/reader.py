"""Read torch.distributed.checkpoint folders (`.metadata` and `*.distcp`), the output of training on many devices.

Neither a process group nor loading is needed: each block of a tensor is a view of its file. The model's tensors have
Hugging Face names after some prefix (`model.`; `model.student.` in uptraining runs; or none), or the names of a
training framework (see `names`). Optimizer states are ignored. config.json and the other files come from a folder
nearby.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from model.checkpoint import hf_folder
from model.checkpoint.formats import rope_order
from model.checkpoint.formats.dcp.config_source import ConfigSource, find_config_source
from model.checkpoint.formats.dcp.metadata import METADATA, Entry, read_metadata
from model.checkpoint.formats.dcp.names import find_framework
from model.checkpoint.formats.dcp.tensors import own_names, renamed
from model.checkpoint.formats.tensor_blocks import TensorBlock, fill_exactly, rows_of_heads, whole_rows
from model.checkpoint.formats.torch_file import DTYPES, TORCH_READER_BYTES, read_piece
from model.checkpoint.hf_config import dtype_settings
from model.checkpoint.interface import Checkpoint, Shard, file_versions
from model.checkpoint.tensor import Array, Span, TensorInfo
from model.checkpoint.tied import without_tied_lm_head
from model.common.errors import CheckpointError
from model.common.typed_json import json_bytes
from model.files.write import allow_open_files


class DistributedFolder(Checkpoint):
    """A folder that torch.distributed.checkpoint wrote."""

    format = "dcp"
    reader_bytes = TORCH_READER_BYTES
    keep_source_shards = False

    def __init__(self, path: Path, prefixes: Sequence[str] = (), config_folder: Path | None = None) -> None:
        """Open a folder. The model's prefix is the first of `prefixes` that occurs, or else found from the names.

        config.json and the other files come from `config_folder`, or else are found nearby.
        """
        self.path = path
        if not (path / METADATA).is_file():
            raise CheckpointError(
                f"{path} has .distcp files but no {METADATA}, which is written last: it is incomplete."
            )
        opened = file_versions([path / METADATA])
        entries = read_metadata(path / METADATA).tensors
        requested = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in entries)), None)
        framework, prefix = find_framework(path, entries) if requested is None else (None, requested)
        parts = own_names(path, entries, prefix, framework)
        if config_folder is not None:
            source = ConfigSource(config_folder, *hf_folder.read_config(config_folder))
        else:
            infos = [TensorInfo(name, DTYPES[part.dtype], part.shape) for name, part in parts.items()]
            source = find_config_source(path, framework, infos)
        self._config_folder, self.config_bytes, self.config = source.folder, source.config_bytes, source.config
        self.notes = source.notes
        model = renamed(path, parts, framework, self.config)
        names = sorted({chunk.place.file for part in model.values() for chunk in part.entry.chunks})
        self.weight_files = (path / METADATA, *(path / name for name in names))
        self.opened = opened | file_versions(file for file in self.weight_files[1:] if file.exists())
        allow_open_files(len(names))
        files = {name: _map(path, name) for name in names}
        self._parts = model
        self._stored = {name: _assemble(path, part.name, part.entry, files) for name, part in model.items()}
        self.tensors = {name: TensorInfo(name, DTYPES[part.entry.dtype], part.shape) for name, part in model.items()}
        self.tensors = without_tied_lm_head(self)
        # The config is another folder's: training keeps float32 weights of a bfloat16 model, for example.
        settings = dtype_settings(self.tensors.values())
        changed = {key: name for key, name in settings.items() if self.config.get(key) not in (None, name)}
        if changed:
            self.config |= changed
            self.config_bytes = json_bytes(self.config)
        self.shards = (Shard("model.safetensors", tuple(self.tensors)),)
        is_above = self._config_folder in path.absolute().parents
        only = hf_folder.MODEL_FILES if is_above else ("*",)
        self.side_files, skipped_files = hf_folder.list_files(self._config_folder, deep=not is_above, only=only)
        self.skipped_files = tuple(name for name in skipped_files if name not in (METADATA, *names))

    @property
    def config_folder(self) -> Path:
        return self._config_folder

    def span(self, name: str) -> Span | None:
        return self._stored[name][1] if self._parts[name].is_verbatim else None

    def rows(self, name: str, start: int, stop: int) -> Array:
        part, stored = self._parts[name], partial(whole_rows, self._stored[name][0])
        if part.heads is not None:
            stored = partial(rows_of_heads, stored, part.heads, part.head_dim)
        if part.is_interleaved:
            return rope_order.half_split_rows(stored, part.head_dim, start, stop)
        return stored(start, stop)

    def close(self) -> None:
        self._stored.clear()


def _map(path: Path, name: str) -> Array:
    if not (path / name).is_file():
        raise CheckpointError(f"{path / METADATA} names the file {name}, which is missing; fetch it again.")
    if not (path / name).stat().st_size:
        raise CheckpointError(f"{path / name} is empty, but {METADATA} says that it holds tensors; fetch it again.")
    hf_folder.refuse_lfs_pointer(path / name)
    return np.memmap(path / name, np.uint8, mode="r")


def _assemble(
    path: Path, name: str, entry: Entry, files: Mapping[str, Array]
) -> tuple[tuple[TensorBlock, ...], Span | None]:
    """Return the blocks of a tensor, and the range of its bytes if that is contiguous."""
    pieces = []
    for chunk in entry.chunks:
        place = chunk.place
        pieces.append(read_piece(path / place.file, files[place.file], place.offset, place.length))
    for chunk, piece in zip(entry.chunks, pieces, strict=True):
        if (piece.dtype, piece.shape) != (DTYPES[entry.dtype], chunk.shape):
            raise CheckpointError(
                f"{path / chunk.place.file} holds {name} as {piece.dtype} {piece.shape}, where {METADATA} says "
                f"{entry.dtype} {chunk.shape}; they do not match."
            )
    blocks = tuple(TensorBlock(chunk.start, piece.array) for chunk, piece in zip(entry.chunks, pieces, strict=True))
    if any(len(b.start) != len(entry.shape) for b in blocks) or not fill_exactly(blocks, entry.shape):
        raise CheckpointError(f"{path}: the pieces of {name} do not make up its shape {entry.shape}; it is damaged.")
    return blocks, pieces[0].span if len(pieces) == 1 else None


def matches(path: Path) -> bool:
    return path.is_dir() and ((path / METADATA).is_file() or any(path.glob("*.distcp")))


def read(path: Path) -> Checkpoint:
    """Open a folder. Raises CheckpointError for a checkpoint of `uptrain`, some of whose tensors may be elsewhere."""
    for each in (path.absolute(), path.resolve()):
        hf_folder.refuse_checkpoint_of_run(each.parent)
    return DistributedFolder(path)
