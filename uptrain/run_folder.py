"""A run's folder: the names in it, and what `run.json` holds. Reading it needs no torch."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import InputError
from model.files import FileLock, LockedError
from uptrain.settings import Settings

RUN, MODEL, CHECKPOINTS, METRICS, STATE, LOCK = (
    "run.json", "model", "checkpoints", "metrics.jsonl", "run_state.json", ".lock",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What RUN/run.json holds."""

    settings: Settings
    budget: dict[str, Any]
    """How many steps, and where the number comes from."""
    cache_sha256: str
    identities: dict[str, str]
    """Of model, teacher and held-out data: see `uptrain.identity`."""
    versions: dict[str, str]
    parent: dict[str, Any] | None = None
    """The run and step that this one goes on from, if it extends one."""

    @classmethod
    def read(cls, folder: Path) -> "Run":
        path = folder / RUN
        if not path.is_file():
            raise InputError(f"{folder} is not a run: it has no {RUN}; `uptrain run … --out {folder}` makes one.")
        try:
            found = json.loads(path.read_bytes())
            settings = found.pop("settings")
            return cls(**found | {"settings": Settings(**settings | {"track": tuple(settings["track"])})})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is damaged, or of another version of Groupwise ({error}).") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other trainings out of a run. Raises InputError if one is going on there."""
    with ExitStack() as held:
        try:
            held.enter_context(FileLock(folder / LOCK))
        except LockedError as error:
            raise InputError(f"{folder} is being trained by {error}; see `uptrain status {folder}`.") from error
        yield
