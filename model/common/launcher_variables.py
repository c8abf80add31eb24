"""Read the variables by which a launcher tells a process its number, and the number of processes; answer it.

torchrun and `accelerate launch` set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Each process leaves the message of its error where its launcher looks: `uptrain.distributed.launcher` names a folder,
torchrun a file.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from model.common.errors import InputError

MESSAGES = "GROUPWISE_MESSAGES"
"""The variable that names the folder of messages."""
FIRST = "first"
"""The message of the first process on a machine, which it has also printed. Others are called by their RANK."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable by which torchrun, which `accelerate launch` calls, names the file of one process's error."""
_SINGLE = "-1"
"""LOCAL_RANK of a single process, by older launchers."""


def world_size() -> int:
    """Return the number of processes that a launcher has started (WORLD_SIZE); 1 without a launcher.

    Raises InputError if the variable is no positive number.
    """
    return _variable("WORLD_SIZE", 1, least=1)


def local_world_size() -> int:
    """Return the number of processes on this machine that a launcher has started (LOCAL_WORLD_SIZE); else 1."""
    return _variable("LOCAL_WORLD_SIZE", 1, least=1)


def local_rank() -> int:
    """Return the number of this process among those of this machine (LOCAL_RANK); 0 without a launcher."""
    if os.environ.get("LOCAL_RANK") == _SINGLE:
        return 0
    return _variable("LOCAL_RANK", 0, least=0)


def several_machines() -> bool:
    """Return whether a launcher may have started processes on other machines too."""
    return local_world_size() != world_size()


def is_main_process() -> bool:
    """Return whether this is the first of all processes that a launcher has started (RANK)."""
    return world_size() == 1 or os.environ.get("RANK", "0") == "0"


def is_local_main_process() -> bool:
    """Return whether this is the first process on its machine of those that a launcher has started.

    Errors and warnings ask this, so it takes any values.
    """
    return (os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or "0") in ("0", _SINGLE)


def has_launcher() -> bool:
    """Return whether a launcher has started this process. Some clusters set RANK in every process."""
    variables = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and all(os.environ.get(name) for name in variables)


def prints_errors() -> bool:
    """Return whether this process prints errors that all processes of a launcher have: the first on each machine."""
    return is_local_main_process() or not has_launcher()


def leave_message(message: str) -> None:
    """Write the message of this process's error for the launcher, which prints it at its end.

    torchrun reads the JSON that `torch.distributed.elastic.multiprocessing.errors.ProcessFailure` expects.
    """
    if folder := os.environ.get(MESSAGES):
        name = FIRST if is_local_main_process() else os.environ.get("RANK", "")
        with suppress(OSError):
            (Path(folder) / name).write_text(message, encoding="utf-8", errors="backslashreplace")
    elif file := os.environ.get(ERROR_FILE):
        content = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
        complete = Path(f"{file}.complete")  # torchrun ends with a traceback at half a file
        with suppress(OSError):
            complete.write_text(json.dumps(content), encoding="ascii")
            complete.replace(file)


def _variable(name: str, default: int, least: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        what = "a number of processes" if least else "the number of a process"
        raise InputError(f"the variable {name} is {text!r}, not {what}; unset it for a single one.")
    return int(text)
