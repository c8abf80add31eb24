"""Runs several `uptrain` commands in one process (of however many torchrun started), each perhaps stopped on the way.

    python drive_training.py '[{"arguments": ["run", …], "stop_in": 7}, …]'

`stop_in` is the step during which a stop is asked for, as a signal would. Tests use this to prove that a run stopped
and resumed is the run uninterrupted; starting processes anew for each of them would take minutes.
"""

import json
import os
import sys
from typing import Any

import accelerate
from accelerate.state import AcceleratorState

if os.environ.get("ACCELERATE_USE_FSDP"):
    import fsdp_on_cpu  # noqa: F401

import uptrain.loop
from uptrain.cli import cli
from uptrain.signals import stop_request

_windows_of_step = uptrain.loop.windows_of_step
_stop_in: int | None = None


def _windows(step: int, *arguments: Any) -> Any:
    if step == _stop_in and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        stop_request.reason = "test"  # one process asks, the last; all must agree
    return _windows_of_step(step, *arguments)


def main() -> None:
    global _stop_in
    uptrain.loop.windows_of_step = _windows
    accelerate.Accelerator.end_training = lambda self: None  # the next command goes on with these processes
    for job in json.loads(sys.argv[1]):
        AcceleratorState._reset_state()
        stop_request.reason, _stop_in = "", job.get("stop_in")
        cli.main(job["arguments"], standalone_mode=False)


if __name__ == "__main__":
    main()
