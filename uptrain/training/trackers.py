"""Send the numbers of a run to its trackers (`--track`), on the main process.

What fails there, as on a full disk or without a login, must not end the training. So each function returns what failed,
and leaves the tracker out from then on.
"""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator


def start_trackers(accelerator: Accelerator, name: str, config: dict[str, Any]) -> list[str]:
    """Start the trackers that the accelerator was made with, for a run of this name."""
    wanted, started, failures = accelerator.log_with, list[Any](), list[str]()
    for kind in wanted:
        accelerator.log_with, accelerator.trackers = [kind], []
        try:
            accelerator.init_trackers(name, config=config)
        except Exception as error:  # each tracker's package has its own
            failures.append(f"{kind}: {_one_line(error)}")
        else:
            started += accelerator.trackers
    accelerator.log_with, accelerator.trackers = wanted, started
    return failures


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
    return " ".join(str(error).split()) or type(error).__name__
