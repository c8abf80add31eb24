"""Run worker processes, one core each. They exit after their work, on request, and with their parent process."""

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, connection, resource_tracker
from pathlib import Path
from typing import Any, Self, TypeVar

from uptrain.data.prepare.tokenise import Job, Progress, tokenise
from uptrain.data.prepare.tokenizer import Encoder, Tokenizer
from uptrain.data.prepare.work_units import Unit, UnitRecord
from uptrain.distributed.signals import blocked_in_children

TICK_SECONDS = 0.2
"""Interval of progress updates."""
BLOCK_BYTES = 1 << 20
KILLED_WORKER = (
    "a worker process was killed, perhaps for lack of memory: try fewer --workers, or divide very long documents"
)

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stopped(Exception):
    """Signal to abandon the work: the pool was closed."""


@dataclass
class _Shared:
    """Counters and stop flag that the workers share with their parent process."""

    n_read: Any
    n_written: Any
    stop: Any

    @classmethod
    def make(cls, context: Any) -> Self:
        return cls(context.Value("q"), context.Value("q"), context.Event())

    def report(self, n_read: int, n_written: int) -> None:
        for counter, n in ((self.n_read, n_read), (self.n_written, n_written)):
            with counter.get_lock():
                counter.value += n
        if self.stop.is_set():
            raise Stopped


@dataclass
class _Worker:
    job: Job
    encoder: Encoder | None
    shared: _Shared


_worker: _Worker


def _start(job: Job, tokenizer: Tokenizer | None, shared: _Shared) -> None:
    """Initialise this process as a worker."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(job, Encoder(tokenizer) if tokenizer else None, shared)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def tokenise_unit(unit: Unit) -> UnitRecord:
    return tokenise(unit, _worker.job, _worker.encoder, _worker.shared.report)


def hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            _worker.shared.report(len(block), 0)
    return digest.hexdigest()


class Pool:
    """Pool of worker processes; a context manager that stops them."""

    def __init__(self, n: int, job: Job, tokenizer: Tokenizer | None) -> None:
        context = multiprocessing.get_context("spawn")
        with blocked_in_children():  # a terminal and Slurm send signals to all processes, also to this one
            resource_tracker.ensure_running()
        self._n = n
        self._others = set(active_children())
        self._shared = _Shared.make(context)
        self._executor = ProcessPoolExecutor(n, context, _start, (job, tokenizer, self._shared))
        self._reported = (0, 0)
        self._closed = threading.Event()
        with blocked_in_children():  # a signal is for the main thread
            threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._shared.stop.set()
        self._closed.set()
        self._executor.shutdown(cancel_futures=True)

    def run(
        self, do: Callable[[Item], Result], items: Iterator[Item], progress: Progress
    ) -> Iterator[tuple[Item, Future[Result]]]:
        """Yield each item with its future, in the order of completion.

        The next item is requested when a worker is free, so `items` may depend on finished work. Raises OSError if a
        worker was killed.
        """
        running: dict[Future[Result], Item] = {}
        while True:
            while len(running) < self._n and (item := next(items, None)) is not None:
                try:
                    with blocked_in_children():  # a worker starts when it is needed, and is stopped by the flag
                        running[self._executor.submit(do, item)] = item
                except BrokenProcessPool as error:
                    self._kill()
                    raise OSError(KILLED_WORKER) from error
            if not running:
                return
            finished, _ = wait(running, TICK_SECONDS, FIRST_COMPLETED)
            self._report(progress)
            for future in finished:
                if isinstance(future.exception(), BrokenProcessPool):
                    self._kill()
                    raise OSError(KILLED_WORKER)
                yield running.pop(future), future

    def _watch(self) -> None:
        """Kill all workers once one was killed, from a thread of its own.

        From Python 3.12 on, the executor then waits for the others, which block its SIGTERM, and `submit` for it.
        """
        workers: set[Any] = set()
        while not self._closed.wait(TICK_SECONDS):
            workers |= set(active_children()) - self._others
            if any((process.exitcode or 0) < 0 for process in workers):
                self._kill()
                return

    def _kill(self) -> None:
        """Kill the workers that are left."""
        for process in set(active_children()) - self._others:
            process.kill()

    def _report(self, progress: Progress) -> None:
        totals = self._shared.n_read.value, self._shared.n_written.value
        progress(totals[0] - self._reported[0], totals[1] - self._reported[1])
        self._reported = totals
