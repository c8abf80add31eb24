"""Checkpoints on disk: `open_checkpoint` chooses a reader for the format; `safetensors_writer` writes safetensors."""

from importlib import import_module
from pathlib import Path

from model.checkpoint.hf_folder import refuse_file_of_model, refuse_without_weights
from model.checkpoint.hub import find_in_cache
from model.checkpoint.interface import Checkpoint, Shard
from model.checkpoint.tensor import FLOAT_DTYPES, Array, Span, TensorInfo
from model.checkpoint.tied import with_stored_lm_head
from model.common.errors import CheckpointError
from model.files.paths import similar_path

__all__ = ["FLOAT_DTYPES", "Array", "Checkpoint", "Shard", "Span", "TensorInfo", "open_checkpoint"]

READERS = {
    "gguf": "gguf.reader",
    "safetensors": "safetensors",
    "bin": "pytorch_bin",
    "meta": "meta_llama.reader",
    "dcp": "dcp.reader",
}
"""Formats and their modules in `model.checkpoint.formats`, imported when used. The first that matches is used."""

WHAT_A_MODEL_IS = (
    "a model is a checkpoint folder, a .gguf file, or the name of a model in the Hugging Face cache (org/name)"
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`: a folder in one of several formats, a `.gguf` file, or a model in the hub's cache.

    If a folder holds several formats, the first one in READERS is used. Raises CheckpointError if there is no
    checkpoint, or it cannot be read safely.
    """
    try:
        return _open(path)
    except PermissionError as error:
        raise CheckpointError(f"{error.filename} may not be read; check its permissions.") from error


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        if path.is_symlink():
            raise CheckpointError(f"{path}: a dangling symlink; {WHAT_A_MODEL_IS}.")
        cached = find_in_cache(path)
        if cached is None:
            similar = similar_path(path)
            raise CheckpointError(
                f"{path}: no such file or folder; {f'did you mean {similar}?' if similar else f'{WHAT_A_MODEL_IS}.'}"
            )
        path = cached
    for name in READERS.values():
        reader = import_module(f"model.checkpoint.formats.{name}")
        if reader.matches(path):
            checkpoint: Checkpoint = reader.read(path)
            return with_stored_lm_head(checkpoint)
    if path.is_dir():
        refuse_without_weights(path)
    refuse_file_of_model(path)
    raise CheckpointError(f"{path} is a file of an unknown kind; {WHAT_A_MODEL_IS}.")
