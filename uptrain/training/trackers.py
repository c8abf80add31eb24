"""Send the numbers of a run to its trackers (`--track`), on the main process.

What fails there, as on a full disk or without a login, must not end the training. So each function returns what failed,
and leaves the tracker out from then on.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from model.common.printable import one_line

WANDB_PROJECT = "groupwise"
"""The project of Weights & Biases, unless the variable of this name says another."""


def start_trackers(
    accelerator: Accelerator, folder: Path, run_id: str, config: dict[str, Any], step: int = 0
) -> list[str]:
    """Start the trackers that the accelerator was made with, for the run in a folder; `run_id` outlives a resume.

    `step`: where the run goes on. What was sent of later steps is removed, since it is sent again.
    """
    wanted, started, failures = accelerator.log_with, list[Any](), list[str]()
    for kind in wanted:
        accelerator.log_with, accelerator.trackers = [kind], []
        try:
            project, options = _project(str(kind), folder, run_id, step)
            accelerator.init_trackers(project, config=config, init_kwargs=options)
        except Exception as error:  # each tracker's package has its own
            failures.append(f"{kind}: {_one_line(error)}")
        else:
            started += accelerator.trackers
    accelerator.log_with, accelerator.trackers = wanted, started
    return failures


def _project(kind: str, folder: Path, run_id: str, step: int) -> tuple[str, dict[str, Any]]:
    """Return the project of a tracker, and the options that its run is started with."""
    if kind == "tensorboard":  # it removes the points of later steps
        return folder.name, {kind: {"purge_step": step + 1}}
    if kind != "wandb":
        return folder.name, {}
    options = {"name": folder.name, "id": run_id, "resume": "allow", "dir": str(folder)}
    return os.environ.get("WANDB_PROJECT", WANDB_PROJECT), {kind: options}


def log_to_trackers(accelerator: Accelerator, values: dict[str, Any], step: int) -> list[str]:
    """Send numbers to each tracker."""
    return _of_each(accelerator, lambda tracker: tracker.log(values, step=step))


def finish_trackers(accelerator: Accelerator) -> list[str]:
    """Let each tracker write what it still holds."""
    return _of_each(accelerator, lambda tracker: tracker.finish())


def _of_each(accelerator: Accelerator, call: Callable[[Any], None]) -> list[str]:
    failures = []
    for tracker in list(accelerator.trackers) if accelerator.is_main_process else ():
        try:
            call(tracker)
        except Exception as error:  # each tracker's package has its own
            accelerator.trackers.remove(tracker)
            failures.append(f"{tracker.name}: {_one_line(error)}")
    return failures


def _one_line(error: Exception) -> str:
    return one_line(str(error)) or type(error).__name__
