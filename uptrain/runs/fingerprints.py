"""Compute fingerprints of a run's model, teacher or its logits, and held-out data, and check them on resume."""

import hashlib
import json
from pathlib import Path

from model.checkpoint import Checkpoint, open_checkpoint
from model.checkpoint.same_bytes import sampled_rows
from model.common.errors import InputError
from model.files.names import RUN_JSON
from model.language_model import InsideWrapper, open_language_model
from uptrain.data.teacher_logits import LogitsManifest
from uptrain.data.token_cache import TokenCache
from uptrain.models.stored_names import frozen_names
from uptrain.runs.run_folder import FINGERPRINTED, Run
from uptrain.runs.settings import Settings

N_PIECES, PIECE_BYTES = 64, 1 << 16
"""Pieces of a weight file that are hashed, and their size, because files are large."""
_BLOCK = 64 << 20
"""Bytes of a tensor that are in memory at once."""


def run_fingerprints(settings: Settings) -> dict[str, str]:
    """Return the SHA-256 of those that the run has: model, teacher, its logits, held-out data, and frozen tensors."""
    sha256s = {name: _sha256(name, Path(path)) for name in FINGERPRINTED if (path := getattr(settings, name))}
    if settings.trainable != "all":
        sha256s["frozen"] = _of_frozen_tensors(settings)
    return sha256s


def _sha256(name: str, path: Path) -> str:
    """Return the SHA-256 of the content of one of the settings FINGERPRINTED."""
    if name == "teacher_logits":
        return LogitsManifest.parse(path).sha256
    return TokenCache.open(path).manifest.sha256 if name == "eval_data" else model_sha256(path)


def check_same_frozen(settings: Settings, recorded: dict[str, str]) -> None:
    """Raise InputError if the model's tensors that are not trained differ from those the run began with.

    Checkpoints do not hold them, so they are read from the model again.
    """
    if settings.trainable == "all":
        return
    if not Path(settings.model).exists():
        raise InputError(
            f"{settings.model} does not exist; the run reads the tensors from it that it does not train. Restore it, "
            "or put a link to it there."
        )
    if _of_frozen_tensors(settings) != recorded["frozen"]:
        raise InputError(
            f"{settings.model} holds other tensors than when the run began, or the run began with another --trainable "
            f"than {settings.trainable}; restore it, or start a new run."
        )


def check_same(settings: Settings, recorded: dict[str, str], with_model: bool) -> None:
    """Raise InputError if frozen tensors, teacher, its logits or held-out data differ from when the run began.

    `with_model`: compare all of the model too.
    """
    check_same_frozen(settings, recorded)
    for name, other in FINGERPRINTED.items():
        if not getattr(settings, name) or (name == "model" and not with_model):
            continue
        path = Path(getattr(settings, name))
        if name not in recorded:
            raise InputError(
                f"{RUN_JSON} has settings.{name} = {path}, but no identities.{name}; settings cannot be edited."
            )
        if not path.exists():
            raise InputError(
                f"{path}, the run's {name.replace('_', ' ')}, does not exist; restore it, or put a link to it there."
            )
        if _sha256(name, path) != recorded[name]:
            raise InputError(f"{path} is {other} than when the run began; restore it, or start a new run.")


def check_same_data(run: Run, data: str) -> None:
    """Raise InputError if the training data, or the tokens of a step, differ from those the run began with."""
    manifest = TokenCache.open(Path(data)).manifest
    current, sha256 = manifest.sha256, run.cache_sha256
    if current != sha256:
        raise InputError(
            f"{data} holds other data than when the run began (sha256 {current[:12]}, then {sha256[:12]}); "
            "restore that cache, or start a new run."
        )
    if run.settings.global_batch * manifest.seq_len != run.budget.global_batch_tokens:
        raise InputError(
            f"{RUN_JSON} has settings.global_batch = {run.settings.global_batch}, but the budget has steps of "
            f"{run.budget.global_batch_tokens:,} tokens, in windows of {manifest.seq_len:,}; settings cannot be edited."
        )


def _of_frozen_tensors(settings: Settings) -> str:
    """Return the SHA-256 of all bytes of the tensors that are not trained, and of their names, dtypes and shapes."""
    folder, sha256 = Path(settings.model), hashlib.sha256()
    names = frozen_names(folder, settings.trainable)
    with open_language_model(folder) as checkpoint:
        for name in sorted({name for stored in names.values() for name in stored}):
            sha256.update(tensor_sha256(checkpoint, name).encode())
        if isinstance(checkpoint, InsideWrapper):
            for name in sorted(checkpoint.others):
                sha256.update(tensor_sha256(checkpoint.whole, name).encode())
    return sha256.hexdigest()


def tensor_sha256(checkpoint: Checkpoint, name: str) -> str:
    """Return the SHA-256 of a tensor's name, dtype, shape and bytes."""
    tensor = checkpoint.tensors[name]
    sha256 = hashlib.sha256(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
    for start, stop in tensor.row_blocks(_BLOCK):
        sha256.update(checkpoint.rows(name, start, stop).tobytes())
    return sha256.hexdigest()


def model_sha256(folder: Path) -> str:
    """Return the SHA-256 of a model's config, of names, sizes and pieces of its weight files, and rows of tensors.

    Models of which a part was trained differ in a few tensors only, which the pieces can miss. A tensor that was
    trained differs in nearly all of its rows.
    """
    with open_checkpoint(folder) as checkpoint:
        sha256 = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
        for path in checkpoint.weight_files:
            size = path.stat().st_size
            sha256.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for offset in sorted({i * max(size - PIECE_BYTES, 0) // (N_PIECES - 1) for i in range(N_PIECES)}):
                    file.seek(offset)
                    sha256.update(file.read(PIECE_BYTES))
        for name in sorted(checkpoint.tensors):
            for row in sampled_rows(checkpoint, name):
                sha256.update(row)
    return sha256.hexdigest()
