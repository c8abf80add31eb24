"""Read Hugging Face folders with `pytorch_model.bin`, the format before safetensors: one file, or shards and index."""

from pathlib import Path

from model.checkpoint import hf_folder
from model.checkpoint.formats.torch_file import TORCH_READER_BYTES, read_tensors
from model.checkpoint.interface import Checkpoint, file_versions
from model.checkpoint.safetensors_writer import name_shards
from model.checkpoint.shard_index import PYTORCH, check_index, weight_file_names
from model.checkpoint.tensor import Array, Span, TensorInfo
from model.checkpoint.tied import without_tied_lm_head


class BinFolder(Checkpoint):
    """A Hugging Face folder with `pytorch_model.bin`, or shards and their index."""

    format = "bin"
    reader_bytes = TORCH_READER_BYTES

    def __init__(self, path: Path) -> None:
        hf_folder.refuse_adapter(path)
        self.path = path
        self.config_bytes, self.config = hf_folder.read_config(path)
        names, table = weight_file_names(path, PYTORCH)
        self.weight_files = tuple(path / name for name in names)
        self.side_files, skipped_files = hf_folder.list_files(path)
        self.skipped_files = tuple(name for name in skipped_files if name not in (*names, PYTORCH.index))
        self.opened = file_versions(self.weight_files)
        files = {file.name: read_tensors(file) for file in self.weight_files}
        check_index(path / PYTORCH.index, files, table)
        self._stored = {name: stored for tensors in files.values() for name, stored in tensors.items()}
        self.tensors = {name: TensorInfo(name, stored.dtype, stored.shape) for name, stored in self._stored.items()}
        self.tensors = without_tied_lm_head(self)
        groups = [[self.tensors[name] for name in tensors if name in self.tensors] for tensors in files.values()]
        self.shards = name_shards([group for group in groups if group], {})

    def span(self, name: str) -> Span | None:
        return self._stored[name].span

    def rows(self, name: str, start: int, stop: int) -> Array:
        array = self._stored[name].array
        return array[start:stop] if array.shape else array.reshape(1)  # a scalar has no rows

    def close(self) -> None:
        self._stored.clear()


def matches(path: Path) -> bool:
    return path.is_dir() and PYTORCH.is_in(path)


def read(path: Path) -> Checkpoint:
    return BinFolder(path)
