"""Collective operations: sum, all-gather, work or warn on the main process, and destroy the process group."""

import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from model.common.console import warn
from model.common.errors import InputError, RunError
from model.common.launcher_variables import is_local_main_process, is_main_process, several_machines
from model.common.printable import one_line
from uptrain.distributed.signals import interruptible, stop_request

T = TypeVar("T")
_POLL_SECONDS = 0.5
_SHORTEST_PAUSE = 0.002
_SHARED_DISK_SECONDS = 600.0
"""The longest time until the main process has started, and the other machines see a file of it on the shared disk."""


def all_reduce_sum(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Return the sum over all ranks; `values` is overwritten."""
    if accelerator.num_processes > 1:
        dist.all_reduce(values)
    return values


def all_reduce_max(accelerator: Accelerator, value: Tensor) -> Tensor:
    """Return the largest of all ranks' values; `value` is overwritten."""
    if accelerator.num_processes > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value


def all_gather(accelerator: Accelerator, value: T) -> list[T]:
    """Return the values of all ranks, in their order."""
    if accelerator.num_processes == 1:
        return [value]
    values: list[T] = gather_object([value])
    return values


def destroy_process_group() -> None:
    """Destroy the process group; call this after releasing everything that uses it.

    What was released may still wait for the garbage collector, and DDP's reducer in it owns the group. As the last
    owner it could deadlock: it would join gloo's threads while it holds the interpreter lock, which they may wait for.
    And a thread of gloo that wants this lock while the interpreter ends aborts the process.
    """
    gc.collect()
    _connection.cache_clear()
    PartialState().destroy_process_group()


def warn_on_local_main(*warnings: str | None) -> None:
    """Print those warnings that are not None, once per machine."""
    for warning in filter(None, warnings if is_local_main_process() else ()):
        warn(warning)


def on_main_without_group(work: Callable[[], object], done: Path) -> None:
    """Run `work` on the main process, while the others wait for the file `done`, which it writes last.

    This is for long work before the process group exists, since collectives have a timeout. If the main process fails,
    the launcher ends the others. With several machines, a marker beside the folder of `done` shows that they share its
    disk. Raises InputError on a machine where neither appears within _SHARED_DISK_SECONDS.
    """
    folder = done.absolute().parent
    marker = folder.parent / f".{folder.name}.started"
    if is_main_process():
        with _marked(marker) if several_machines() else nullcontext():
            work()
    is_shared, deadline = not several_machines(), time.monotonic() + _SHARED_DISK_SECONDS
    with interruptible():
        while not done.is_file():
            is_shared = is_shared or _has_mark(marker)
            if not is_shared and time.monotonic() > deadline:
                raise InputError(
                    f"not every process finds {folder}; put the run into a folder that all machines share."
                )
            time.sleep(_POLL_SECONDS)


@contextmanager
def _marked(marker: Path) -> Iterator[None]:
    """Show that the main process has started, by a small file. `work` reports a disk that cannot be written."""
    with suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(_start_id())
    try:
        yield
    finally:
        with suppress(OSError):
            marker.unlink(missing_ok=True)


def _has_mark(marker: Path) -> bool:
    """Return whether the main process of this start wrote the marker; one that was killed has left its own."""
    try:
        return marker.read_text(errors="replace") == _start_id()
    except OSError:
        return False


def _start_id() -> str:
    """Return what tells this start of all processes from an earlier one."""
    return " ".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Run `work` on the main process; return its result on all ranks.

    It may take longer than the timeout of collectives, such as to read a large model from a slow disk. Raises
    InputError on all ranks if `work` does, and RunError for an OSError. Any other exception is raised on the main
    process, and RunError on the others, which would else wait for it.
    """
    outcome: list[tuple[T | None, type[Exception] | None, str]] = [(None, None, "")]
    own_error: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome = [(work(), None, "")]
        except InputError as error:
            outcome = [(None, InputError, str(error))]
        except OSError as error:
            outcome = [(None, RunError, str(error))]
        except Exception as error:
            own_error = error
            outcome = [(None, RunError, f"the main process failed ({type(error).__name__}: {one_line(str(error))}).")]
    if accelerator.num_processes > 1:
        _wait_for_main(accelerator)
        dist.broadcast_object_list(outcome, src=0)
    if own_error is not None:
        raise own_error
    result, kind, message = outcome[0]
    if kind is not None:
        raise kind(message)
    return result  # type: ignore[return-value]


def _wait_for_main(accelerator: Accelerator) -> None:
    """Wait until the main process calls this, however long that takes; a collective would time out.

    A stop request ends the waiting. It may come from the launcher, because the main process has ended: then the
    collective that follows fails. Raises a DistError if the store's process has ended.
    """
    store, calls = _connection()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives the attempts
    key = f"groupwise/{attempt}/on_main/{next(calls)}"
    if accelerator.is_main_process:
        store.set(key, "")
        return
    pause = _SHORTEST_PAUSE
    while not stop_request.reason and not store.check([key]):  # `wait` would log a warning with each timeout
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)


@functools.cache
def _connection() -> tuple[TCPStore, Iterator[int]]:
    """Connect to the launcher's store, by which the process group was made; return it with numbers of its keys.

    All ranks use the numbers in the same order.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False), itertools.count()
