"""What processes do together: add up, gather, wait for the main one, and part."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor

from model.common.errors import InputError
from uptrain.runs.signals import interruptible

T = TypeVar("T")
_POLL_SECONDS = 0.5


def all_reduce_sum(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Return the sum over all processes."""
    if accelerator.num_processes > 1:
        dist.all_reduce(values)
    return values


def gather(accelerator: Accelerator, value: T) -> list[T]:
    """Return every process' value, in the order of ranks."""
    if accelerator.num_processes == 1:
        return [value]
    found: list[T] = gather_object([value])
    return found


def destroy_process_group() -> None:
    """Leave the process group, once nothing that uses it is left.

    DDP's reducer, if it were the group's last owner, would wait for gloo's thread with the interpreter's lock in hand,
    for which that thread may be waiting.
    """
    PartialState().destroy_process_group()


def is_lost_process(error: Exception) -> bool:
    """Say whether an error means that another process could not be reached, most likely because it has ended.

    gloo's are RuntimeErrors that name the file they come from. NCCL mostly ends the process itself, from its watchdog,
    at the latest half an hour after (`accelerator.PATIENCE`).
    """
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def main_process_first(work: Callable[[], object], done: Path) -> None:
    """Let the main process do what may take long and ends with a file, while the others wait for that file.

    Before the processes join: a message between them would not be waited for as long. If the
    main process fails, the launcher ends the others.
    """
    if os.environ.get("RANK", "0") == "0":
        work()
    with interruptible():
        while not done.is_file():
            time.sleep(_POLL_SECONDS)


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Let the main process do something, and give all its result, or its InputError."""
    outcome: list[tuple[T | None, str | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            outcome = [(work(), None)]
        except (InputError, OSError) as error:
            outcome = [(None, str(error))]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, message = outcome[0]
    if message is not None:
        raise InputError(message)
    return result  # type: ignore[return-value]
