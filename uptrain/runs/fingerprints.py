"""Compute fingerprints of a run's model, teacher and held-out data, and check them on resume."""

import hashlib
import json
from pathlib import Path

from model.checkpoint import open_checkpoint
from model.common.errors import InputError
from uptrain.data.token_cache import Cache
from uptrain.runs.settings import Settings

N_PIECES, PIECE_BYTES = 64, 1 << 16
"""Pieces of a weight file that are hashed, and their size: different weights differ everywhere, and files are large."""


def identities(settings: Settings) -> dict[str, str]:
    """Return the SHA-256 of the model, the teacher and the held-out data, as far as the run has them."""
    models = {"model": settings.model, "teacher": settings.teacher}
    sha256s = {name: _of_model(Path(path)) for name, path in models.items() if path}
    return sha256s | ({"eval_data": Cache.open(Path(settings.eval_data)).manifest.sha256} if settings.eval_data else {})


def check_same(settings: Settings, recorded: dict[str, str], with_model: bool) -> None:
    """Raise InputError if teacher or held-out data, or `with_model` the model, differ from those the run began with."""
    to_check = {name: sha256 for name, sha256 in recorded.items() if with_model or name != "model"}
    paths = {"model": settings.model, "teacher": settings.teacher, "eval_data": settings.eval_data}
    for name, sha256 in to_check.items():
        path = Path(paths[name])
        current = Cache.open(path).manifest.sha256 if name == "eval_data" else _of_model(path)
        if current != sha256:
            other = {"model": "another model", "teacher": "another teacher", "eval_data": "other held-out data"}[name]
            raise InputError(f"{path} is {other} than when the run began; restore it, or start a new run.")


def _of_model(folder: Path) -> str:
    """Return the SHA-256 of the config and of the names, sizes and sampled pieces of the weight files."""
    with open_checkpoint(folder) as checkpoint:
        sha256 = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
        for path in checkpoint.weight_files:
            size = path.stat().st_size
            sha256.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for offset in sorted({i * max(size - PIECE_BYTES, 0) // (N_PIECES - 1) for i in range(N_PIECES)}):
                    file.seek(offset)
                    sha256.update(file.read(PIECE_BYTES))
    return sha256.hexdigest()
