"""torch.distributed.checkpoint folders: `.metadata` and `*.distcp`, as training on many devices leaves them.

Read without a process group and without loading: each piece of a tensor is a view of the file it lies in. The model's
tensors have Hugging Face names behind some prefix (`model.`; `model.student.` in our own runs; or none). Optimizer
states are left aside. config.json and the other files come from a folder nearby.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from model.checkpoint import folder
from model.checkpoint.blocks import Block, fill_exactly, whole_rows
from model.checkpoint.checkpoint import Checkpoint, Shard
from model.checkpoint.dcp_metadata import FILE, Entry, read_metadata
from model.checkpoint.tensor import Array, Span, Tensor
from model.checkpoint.tied import EMBEDDING, without_tied_head
from model.checkpoint.torch_file import DTYPES, TORCH_BYTES, check_name, read_piece
from model.errors import CheckpointError

# What training saves beside the model.
OTHERS = re.compile(r"(?:^|\.)(?:optim|optimizers?|(?:lr_)?schedulers?|data_?loader|train_state|rng|rng_state)\.")


class DistributedFolder(Checkpoint):
    """A folder that torch.distributed.checkpoint wrote."""

    format = "dcp"
    reader_bytes = TORCH_BYTES
    is_sharded_by_user = False

    def __init__(self, path: Path, prefixes: Sequence[str] = ()) -> None:
        """Open a folder. Of `prefixes` the first that there is ends before the model's own names; else it is found."""
        self.path = path
        self._home = _find_home(path)
        self.config_text, self.config = folder.read_config(self._home)
        entries = _of_the_model(path, _read_metadata(path), prefixes)
        names = sorted({chunk.file for entry in entries.values() for chunk in entry.chunks})
        self.weight_files = (path / FILE, *(path / name for name in names))
        files = {name: _map(path, name) for name in names}
        self._stored = {name: _put_together(path, name, entry, files) for name, entry in entries.items()}
        self.tensors = {name: Tensor(name, DTYPES[entry.dtype], entry.shape) for name, entry in entries.items()}
        self.tensors = without_tied_head(self)
        self.shards = (Shard("model.safetensors", tuple(self.tensors)),)
        self.side_files, left_out = folder.list_files(self._home, deep=self._home not in path.absolute().parents)
        self.left_out = tuple(name for name in left_out if name not in (FILE, *names))

    @property
    def home(self) -> Path:
        return self._home

    def span(self, name: str) -> Span | None:
        return self._stored[name][1]

    def rows(self, name: str, start: int, stop: int) -> Array:
        return whole_rows(self._stored[name][0], start, stop)

    def close(self) -> None:
        self._stored.clear()


def _find_home(path: Path) -> Path:
    """Return the nearest folder with config.json: the checkpoint's, the one above, or RUN/model of our own runs."""
    above = path.absolute().parents
    places = [path, above[0], *(parent / "model" for parent in above[2:3])]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise CheckpointError(
        f"{path} is a torch.distributed.checkpoint, which needs the model's config.json; it is in none of "
        f"{', '.join(map(str, places))}: copy it, with the tokenizer's files, into the first."
    )


def _read_metadata(path: Path) -> dict[str, Entry]:
    if not (path / FILE).is_file():
        raise CheckpointError(f"{path} has .distcp files but no {FILE}, which is written last: it is incomplete.")
    return read_metadata(path / FILE)


def _of_the_model(path: Path, entries: Mapping[str, Entry], known: Sequence[str]) -> dict[str, Entry]:
    """Return the model's tensors by their own names. Raises CheckpointError if that is not certain."""
    prefix = next((p for p in known if any(n.startswith(p) for n in entries)), None)
    if prefix is None:
        prefix = _find_prefix(path, entries)
    chosen = {}
    for name, entry in entries.items():
        if OTHERS.search(name):
            continue
        check_name(path, name)
        if not name.startswith(prefix) or entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{path} holds {name} ({entry.dtype}), which belongs neither to the model (prefix {prefix!r}) nor to "
                "its optimizer; refused rather than left out."
            )
        chosen[name.removeprefix(prefix)] = entry
    return chosen


def _find_prefix(path: Path, entries: Iterable[str]) -> str:
    prefixes = [n.removesuffix(EMBEDDING) for n in entries if re.fullmatch(rf"(?:.+\.)?{re.escape(EMBEDDING)}", n)]
    if len(prefixes) != 1:
        found = ", ".join(map(repr, prefixes)) if prefixes else f"names like {', '.join(list(entries)[:3])}"
        raise CheckpointError(
            f"{path}: a model has one tensor {EMBEDDING}, after some prefix; here are {len(prefixes)} ({found}). "
            "Save one model under its Hugging Face names."
        )
    return prefixes[0]


def _map(path: Path, name: str) -> Array:
    if not (path / name).is_file():
        raise CheckpointError(f"{path / FILE} names the file {name}, which is missing; fetch it again.")
    if not (path / name).stat().st_size:
        raise CheckpointError(f"{path / name} is empty, but {FILE} says that it holds tensors; fetch it again.")
    folder.refuse_lfs_pointer(path / name)
    return np.memmap(path / name, np.uint8, mode="r")


def _put_together(
    path: Path, name: str, entry: Entry, files: Mapping[str, Array]
) -> tuple[tuple[Block, ...], Span | None]:  # fmt: skip
    """Return the blocks of a tensor, and where its bytes lie if that is in one run."""
    pieces = [read_piece(path / c.file, files[c.file], c.offset, c.length) for c in entry.chunks]
    for chunk, piece in zip(entry.chunks, pieces, strict=True):
        if (piece.dtype, piece.shape) != (DTYPES[entry.dtype], chunk.shape):
            raise CheckpointError(
                f"{path / chunk.file} holds {name} as {piece.dtype} {piece.shape}, where {FILE} says {entry.dtype} "
                f"{chunk.shape}; they do not belong together."
            )
    blocks = tuple(Block(chunk.start, piece.array) for chunk, piece in zip(entry.chunks, pieces, strict=True))
    if any(len(b.start) != len(entry.shape) for b in blocks) or not fill_exactly(blocks, entry.shape):
        raise CheckpointError(f"{path}: the pieces of {name} do not make up its shape {entry.shape}; it is damaged.")
    return blocks, pieces[0].span if len(pieces) == 1 else None


def recognises(path: Path) -> bool:
    return path.is_dir() and ((path / FILE).is_file() or any(path.glob("*.distcp")))


def read(path: Path) -> Checkpoint:
    return DistributedFolder(path)
