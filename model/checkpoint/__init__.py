"""Checkpoints on disk: `open_checkpoint` finds the reader; `writer` is the one way out."""

from importlib import import_module
from pathlib import Path

from model.checkpoint.checkpoint import Checkpoint, Shard
from model.checkpoint.folder import refuse_without_weights
from model.checkpoint.tensor import FLOAT_DTYPES, Array, Span, Tensor
from model.errors import CheckpointError

__all__ = ["FLOAT_DTYPES", "Array", "Checkpoint", "Shard", "Span", "Tensor", "open_checkpoint"]

# One module each in this folder, imported when used; tried in this order.
READERS = ("gguf", "safetensors", "bin", "meta")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, a Hugging Face folder or a `.gguf` file.

    Raises CheckpointError where there is none, or one that cannot be read safely.
    """
    try:
        return _open(path)
    except PermissionError as error:
        raise CheckpointError(f"{error.filename} may not be read; check its permissions.") from error


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        kind = "a dangling symlink" if path.is_symlink() else "no such file or folder"
        raise CheckpointError(f"{path}: {kind}; SOURCE is a checkpoint folder or a .gguf file.")
    for name in READERS:
        reader = import_module(f"model.checkpoint.{name}")
        if reader.recognises(path):
            checkpoint: Checkpoint = reader.read(path)
            return checkpoint
    if path.is_dir():
        refuse_without_weights(path)
    raise CheckpointError(f"{path} is a file of an unknown kind; SOURCE is a checkpoint folder or a .gguf file.")
