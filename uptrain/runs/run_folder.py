"""Read and lock a run's folder: its file names and the content of `run.json`. Needs no torch."""

import errno
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.common import checks
from model.common.errors import InputError
from model.common.typed_json import check_types, make, parse_object
from model.files.lock import FileLock, LockedError
from model.files.names import CHECKPOINTS, METRICS, RUN_JSON
from model.files.paths import leads_outside
from model.files.read import MAX_CONFIG_BYTES, read_bytes_up_to
from model.files.write import remove_temporary_files
from uptrain.budget.budget import Budget
from uptrain.runs.settings import Settings

MODEL, RUN_STATE, LOCK = "model", "run_state.json", ".lock"
PARENT_TYPES = {"run": str, "step": int}
FINGERPRINTED = {
    "model": "another model", "teacher": "another teacher", "teacher_logits": "other logits",
    "eval_data": "other held-out data",
}  # fmt: skip
"""Settings whose content has a fingerprint, and the words for other content than when the run began."""
RUN_STATE_TYPES = {
    "status": str, "step": int, "reason": str, "host": str | None, "pid": int, "started": float | None,
    "pid_namespace": str,
}  # fmt: skip
EARLIER_RUN_STATE = {"host": None, "started": None, "pid_namespace": ""}
"""Fields that earlier versions did not write."""
MAX_PID = 2**31 - 1


@dataclass(frozen=True)
class Run:
    """Content of RUN/run.json."""

    settings: Settings
    budget: Budget
    cache_sha256: str
    identities: dict[str, str]
    """The fingerprints, under the key that they have in run.json."""
    versions: dict[str, str]
    parent: dict[str, Any] | None = None
    """Folder and step of the run that this one extends, if any."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of model, frozen tensors, teacher or logits, and held-out data: `uptrain.runs.fingerprints`."""
        return self.identities

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read the folder of a run. Raises InputError if it is none, or its run.json is damaged."""
        path = folder / RUN_JSON
        if not path.is_file():
            hint = "`uptrain run … --out RUN` makes the folder of a run"
            problem = f"is not a run: it has no {RUN_JSON}" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {problem}; {hint}.")
        try:
            run = make(cls, parse_object(read_bytes_up_to(path, MAX_CONFIG_BYTES)))
            run._check()
        except InputError as error:
            reason = str(error).rstrip(".")
            raise InputError(
                f"{path} is damaged, or of another version of Groupwise ({reason}); restore it, or use that version."
            ) from error
        return run

    def _check(self) -> None:
        """Raise InputError for values outside `settings` of a wrong range or type, or that contradict `settings`."""
        for key in ("steps", "global_batch_tokens", "tokens"):
            checks.whole_number(getattr(self.budget, key), f"budget.{key}")
        for key, planned in (("steps", self.budget.steps), ("lr", self.budget.peak_lr)):
            if (value := getattr(self.settings, key)) != planned:
                raise InputError(f"settings.{key} = {value}, but the budget has {planned}; settings cannot be edited")
        if self.budget.original_tokens is not None:
            checks.whole_number(self.budget.original_tokens, "budget.original_tokens")
        if self.parent is not None:
            check_types(self.parent, PARENT_TYPES, "parent")
        for name in self.fingerprints:
            if name != "frozen" and (name not in FINGERPRINTED or not getattr(self.settings, name)):
                raise InputError(f"identities.{name} matches no setting")
        if ("frozen" in self.fingerprints) != (self.settings.trainable != "all"):
            raise InputError(f"identities do not match settings.trainable = {self.settings.trainable}")


def model_folder(folder: Path) -> Path:
    """Return RUN/model, whose files are copied. Raises InputError if it is a link out of the run."""
    model = folder / MODEL
    if leads_outside(model, folder):
        raise InputError(
            f"{model} is a link out of the run, whose files would be copied; move them here. For another disk, put the "
            "whole run there."
        )
    return model


@contextmanager
def locked(folder: Path) -> Iterator[FileLock]:
    """Lock a run against other trainings, and remove the temporary files that a killed one has left.

    Raises InputError if one is running there, or the run cannot be written.
    """
    with ExitStack() as lock:
        try:
            file_lock = lock.enter_context(FileLock(folder / LOCK))
        except LockedError as error:
            see = f"`uptrain status {shlex.quote(str(folder))}`"
            raise InputError(f"{folder} is being trained by {error}; see {see}.") from error
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise InputError(
                f"{folder} cannot be written to ({error.strerror}), so it cannot be trained further; `uptrain extend` "
                "reads it only, and trains in another folder."
            ) from error
        _check_replaceable(folder)
        for name in (RUN_STATE, METRICS, RUN_JSON):
            remove_temporary_files(folder / name)
        yield file_lock


def _check_replaceable(folder: Path) -> None:
    """Raise InputError if something has the name of what training writes and cannot be replaced by it."""
    for name in (RUN_STATE, METRICS):
        _refuse_folder(folder / name)
    checkpoints = folder / CHECKPOINTS
    if checkpoints.exists() and not checkpoints.is_dir():
        raise InputError(f"{checkpoints} is not a folder; move it away.")


def _refuse_folder(path: Path) -> None:
    """Raise InputError if a file's path is a folder, which no file replaces. One replaces a link to a folder."""
    if path.is_dir() and not path.is_symlink():
        raise InputError(f"{path} is a folder, not a file; move it away.")


def read_run_state(path: Path) -> dict[str, Any]:
    """Return the content of run_state.json; empty before the first start. Raises InputError if it is damaged."""
    if not path.exists():
        return {}
    _refuse_folder(path)
    try:
        content = EARLIER_RUN_STATE | parse_object(read_bytes_up_to(path, MAX_CONFIG_BYTES))
        state = check_types(content, RUN_STATE_TYPES)
        checks.whole_number(state["pid"], "pid", most=MAX_PID)
    except InputError as error:
        reason = str(error).rstrip(".")
        resume = f"`uptrain resume {shlex.quote(str(path.parent))}`"
        raise InputError(f"{path} is damaged ({reason}); {resume} writes it again.") from error
    return state
