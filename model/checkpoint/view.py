"""Present a checkpoint with other tensors, names or config."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.checkpoint.interface import Checkpoint
from model.checkpoint.tensor import Array, Span


class CheckpointView(Checkpoint):
    """A view of another checkpoint, which it closes. Subclasses change `tensors`, `rows` and `span`, or the config."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.path, self.format = inner.path, inner.format
        self.tensors, self.shards = dict(inner.tensors), inner.shards
        # `__getattr__` is not asked for what `Checkpoint` has a default of.
        self.skipped_files, self.notes = inner.skipped_files, inner.notes
        self.reader_bytes, self.keep_source_shards = inner.reader_bytes, inner.keep_source_shards
        self.opened, self.config_prefix = inner.opened, inner.config_prefix

    @property
    def config_folder(self) -> Path:
        return self._inner.config_folder

    def name_in_files(self, name: str) -> str:
        return self._inner.name_in_files(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def rows(self, name: str, start: int, stop: int) -> Array:
        return self._inner.rows(name, start, stop)

    def span(self, name: str) -> Span | None:
        return self._inner.span(name)

    def close(self) -> None:
        self._inner.close()


class RenamedTensors(CheckpointView):
    """A checkpoint of which some tensors have other names than in its files."""

    def __init__(self, inner: Checkpoint, names: Mapping[str, str]) -> None:
        """Rename the tensors in `names`: name in the files → name."""
        super().__init__(inner)
        self._in_files = {own: stored for stored, own in names.items()}
        renamed = ((names.get(name, name), tensor) for name, tensor in inner.tensors.items())
        self.tensors = {name: replace(tensor, name=name) for name, tensor in renamed}
        self.shards = tuple(
            replace(shard, tensors=tuple(names.get(name, name) for name in shard.tensors)) for shard in inner.shards
        )

    def name_in_files(self, name: str) -> str:
        return super().name_in_files(self._in_files.get(name, name))

    def rows(self, name: str, start: int, stop: int) -> Array:
        return super().rows(self._in_files.get(name, name), start, stop)

    def span(self, name: str) -> Span | None:
        return super().span(self._in_files.get(name, name))
