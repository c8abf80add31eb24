"""What a run was begun with, told apart from whatever else may lie under the same name when it is resumed."""

import hashlib
import json
from pathlib import Path

from model.checkpoint import open_checkpoint
from model.common.errors import InputError
from uptrain.data.token_cache import Cache
from uptrain.runs.settings import Settings

SAMPLES, SAMPLE = 64, 1 << 16
"""Pieces of a weight file that are looked at, and their bytes: other weights differ everywhere, and files are large."""


def identities(s: Settings) -> dict[str, str]:
    """Return a SHA-256 for each of the model, the teacher and the held-out data, of those that a run has."""
    found = {name: _of_model(Path(path)) for name, path in (("model", s.model), ("teacher", s.teacher)) if path}
    return found | ({"eval_data": Cache.open(Path(s.eval_data)).manifest.sha256} if s.eval_data else {})


def check_same(s: Settings, recorded: dict[str, str], with_model: bool) -> None:
    """Refuse to go on with another teacher or held-out data than the run began with; `with_model`, another model."""
    wanted = {name: sha256 for name, sha256 in recorded.items() if with_model or name != "model"}
    paths = {"model": s.model, "teacher": s.teacher, "eval_data": s.eval_data}
    for name, sha256 in wanted.items():
        path = Path(paths[name])
        found = Cache.open(path).manifest.sha256 if name == "eval_data" else _of_model(path)
        if found != sha256:
            what = {"model": "another model", "teacher": "another teacher", "eval_data": "other held-out data"}[name]
            raise InputError(f"{path} is {what} than when the run began; bring that back, or start a new run.")


def _of_model(folder: Path) -> str:
    """Return a SHA-256 of config, and of names, sizes and pieces of the weight files."""
    with open_checkpoint(folder) as checkpoint:
        found = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
        for path in checkpoint.weight_files:
            size = path.stat().st_size
            found.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for offset in sorted({i * max(size - SAMPLE, 0) // (SAMPLES - 1) for i in range(SAMPLES)}):
                    file.seek(offset)
                    found.update(file.read(SAMPLE))
    return found.hexdigest()
