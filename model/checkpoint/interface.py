"""Define the interface that the readers of all checkpoint formats implement."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from model.checkpoint.tensor import Array, Span, TensorInfo


@dataclass(frozen=True)
class Shard:
    """One weight file: its name, its tensor names in file order, and the metadata of its header."""

    name: str
    tensors: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


FileVersion = tuple[int, int]
"""Size in bytes and modification time in nanoseconds. Inode numbers are no part: sshfs, s3fs and similar file systems
may change them while a file is read."""


def file_version(stat: os.stat_result) -> FileVersion:
    return stat.st_size, stat.st_mtime_ns


def file_versions(files: Iterable[Path]) -> dict[Path, FileVersion]:
    """Return the versions of files. Call it before they are read: what replaces one later is then noticed."""
    return {file: file_version(file.stat()) for file in files}


class Checkpoint(ABC):
    """A model on disk: tensors under their Hugging Face names, `config.json`, and the other files of the model.

    A new format needs one module with a subclass, and one line in `model.checkpoint.READERS`.
    """

    path: Path
    """The folder or file that the user named."""
    format: str
    """The reader's name in `model.checkpoint.READERS`."""
    tensors: dict[str, TensorInfo]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    config_bytes: bytes
    """The bytes of `config.json` in the source, or a config built from the format's own metadata."""
    weight_files: tuple[Path, ...]
    """The files that hold the tensors and their metadata."""
    side_files: dict[str, Path | bytes]
    """The files that are copied unchanged (tokenizer, licence, …): relative name → file or content."""
    skipped_files: tuple[str, ...] = ()
    """Files of the source that are not part of the model, and are not copied."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about assumptions that were made and files that are missing."""
    reader_bytes: int = 0
    """Anonymous memory of the reader and its libraries, in bytes."""
    opened: Mapping[Path, FileVersion] = MappingProxyType({})
    """The versions of the weight files, from before they were read: only these fit the tensors."""
    keep_source_shards: bool = True
    """Whether to keep the source's division into shards. False if the format's files do not correspond to shards."""
    config_prefix: str = ""
    """How the keys of `config` begin in the file, for messages: "text_config." for the language model of a wrapper."""

    @property
    def config_folder(self) -> Path:
        """The folder of `config.json` and the other files, if the source is a folder."""
        return self.path

    def name_in_files(self, name: str) -> str:
        """Return the name that a tensor has in the files, for messages. The tensor may be missing."""
        return name

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Array:
        """Return rows `start:stop` of a tensor's first axis in the tensor's dtype."""

    def all_rows(self, name: str) -> Array:
        """Return all rows of a tensor in the tensor's dtype."""
        return self.rows(name, 0, self.tensors[name].shape[0])

    @abstractmethod
    def span(self, name: str) -> Span | None:
        """Return the file range that holds the tensor's bytes verbatim; None if the format stores them differently."""

    @abstractmethod
    def close(self) -> None:
        """Release open files."""

    def version(self, path: Path) -> FileVersion:
        """Return the version of a weight file when it was opened."""
        return self.opened.get(path) or file_version(path.stat())

    def is_unchanged(self) -> bool:
        """Return whether all weight files are those that were opened. Raises OSError if one is missing."""
        return all(file_version(path.stat()) == self.version(path) for path in self.weight_files)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
