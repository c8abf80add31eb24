"""The small interface behind which every checkpoint format looks the same."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.checkpoint.tensor import Array, Span, Tensor


@dataclass(frozen=True)
class Shard:
    """One weight file as the source divides its tensors: file name, tensor names in file order, header metadata."""

    name: str
    tensors: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


class Checkpoint(ABC):
    """A model on disk: tensors under their Hugging Face names, `config.json`, and the files beside them.

    A reader for a new format is one file that subclasses this and one line in `model.checkpoint.READERS`.
    """

    path: Path
    """What the user named: a folder or a file."""
    format: str
    """The reader's name, for provenance."""
    tensors: dict[str, Tensor]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    config_text: bytes
    """`config.json` as it stands in the source, or as built from the format's own metadata."""
    weight_files: tuple[Path, ...]
    """The files the tensors are read from."""
    side_files: dict[str, Path | bytes]
    """Everything that travels along unchanged (tokenizer, licence, …): relative name to file or content."""
    skipped_files: tuple[str, ...] = ()
    """Files in the source that are not part of the model and are not copied."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it was read, in sentences: what was assumed, what is missing."""
    reader_bytes: int = 0
    """Anonymous memory that the reader takes by itself, in bytes: the libraries it needs."""
    keep_source_shards: bool = True
    """Whether `shards` is a division somebody chose, to be kept, or only this format's single file."""

    @property
    def home(self) -> Path:
        """Where `config.json` and its like are from, if that is a folder."""
        return self.path

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> Array:
        """Return rows `start:stop` of a tensor's first axis, in the tensor's own dtype."""

    @abstractmethod
    def span(self, name: str) -> Span | None:
        """Return where the tensor's bytes lie verbatim, or None where the format stores them differently."""

    @abstractmethod
    def close(self) -> None:
        """Release open files."""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
