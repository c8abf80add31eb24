"""Explain errors that end a run: one line on what happened, and how to continue."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from model.common.errors import (
    InputError,
    LostProcessError,
    RankError,
    RunError,
    is_device_error,
    is_lost_process,
    is_out_of_memory,
)
from model.common.printable import first_sentence, one_line
from model.files.names import CHECKPOINTS
from uptrain.checkpoints.files import list_checkpoints
from uptrain.checkpoints.tensors import SaveError


@contextmanager
def device_errors_as_run_error(
    accelerator: Accelerator,
    advice: str = "use devices with more, or more devices. `uptrain plan --memory` shows what fits.",
) -> Iterator[None]:
    """Raise RunError, or RankError in one of many processes, if models do not fit into memory or a GPU fails."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            text = f"not enough memory ({first_sentence(str(error))}) for the models; {advice}"
        elif is_device_error(error):
            text = f"the GPU failed ({_first_line(error)}); try again, or use another device."
        else:
            raise
        raise _own_error(text, accelerator) from error


def explain_error(error: Exception, folder: Path, step: int, accelerator: Accelerator) -> Exception:
    """Return a RunError of one line in place of an error that the user can resolve; return any other error unchanged.

    An error that all ranks share, such as a failed save, becomes a RunError, which the main process reports. An error
    of one rank becomes a RankError.
    """
    hint = f"`uptrain resume {shlex.quote(str(folder))}` {_resumed_at(folder)}"
    if isinstance(error, SaveError):
        return RunError(f"step {step}, where the run ends, could not be saved: {error}. Fix that, then {hint}.")
    if is_out_of_memory(error):
        text = (
            f"after step {step}, memory ran out ({first_sentence(str(error))}). {hint}; to use less memory, "
            "add a smaller --micro-batch or --activation-checkpointing; `uptrain plan --memory` shows what fits."
        )
        return _own_error(text, accelerator)
    if is_device_error(error):
        text = (
            f"after step {step}, the GPU failed ({_first_line(error)}). {hint}; if it fails again, on another device."
        )
        return _own_error(text, accelerator)
    if is_lost_process(error):
        return LostProcessError(
            f"after step {step}, another process cannot be reached; {hint}. If it failed, it has printed why "
            f"({first_sentence(_without_place(error))})."
        )
    if isinstance(error, (InputError, OSError)):
        return _own_error(f"after step {step}: {str(error).rstrip('.')}. Fix that, then {hint}.", accelerator)
    return error


def _without_place(error: Exception) -> str:
    """Return what gloo says, without the line of its source."""
    return re.sub(r"^\[[^\]]*gloo/[^\]]*\] ", "", str(error))


def _first_line(error: Exception) -> str:
    """Return what failed, without CUDA's advice on how to debug it."""
    return one_line(str(error).strip().partition("\n")[0])


def _own_error(text: str, accelerator: Accelerator) -> RunError:
    """Return the error of one process: if it is one of many, a RankError, which that process prints itself."""
    is_one_of_many = accelerator.num_processes > 1
    return RankError(f"process {accelerator.process_index}, {text}") if is_one_of_many else RunError(text)


def _resumed_at(folder: Path) -> str:
    try:
        is_saved = bool(list_checkpoints(folder / CHECKPOINTS))
    except OSError:  # it must not hide the error to explain
        is_saved = True
    return "continues from the newest checkpoint" if is_saved else "starts at step 0 (no checkpoint was saved)"
