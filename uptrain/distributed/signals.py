"""Handle stop requests: each of STOP_SIGNALS requests a save and an exit; a second one exits immediately.

The handlers only set a flag, and say so once. The loop reads it once per step, where all processes can agree.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from model.common.interrupts import exit_at_once
from model.common.launcher_variables import is_local_main_process

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""SIGHUP is sent when the terminal is closed; a process that `nohup` started ignores it."""
_SAME_REQUEST_SECONDS = 1.0
"""Signals within this time count as one request: a launcher may forward a signal that the terminal sent as well."""
KILLED = 130
"""Exit code after a second signal."""
STARTS_AGAIN = "nothing was kept, and the same command starts again"
CONTINUES = "finished work is kept, and the same command continues"
STOPPING = (
    "Stopping. The run saves first, if it has begun and no process has failed; a second signal stops it without saving."
)


class StopRequest:
    """Flag that this process, of a training run, was asked to stop, with the name of the signal."""

    def __init__(self) -> None:
        self.reason = ""
        self._first = 0.0

    def install(self) -> None:
        """Install the handlers. Call this before slow imports: until then a signal kills the process."""
        for number in _handled():
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason and now - self._first > _SAME_REQUEST_SECONDS:
            exit_at_once(b"stopped by a second signal, without saving.\n", KILLED)
        if not self.reason:
            self.reason, self._first = signal.Signals(number).name, now
            if is_local_main_process():
                _say_stopping()


stop_request = StopRequest()


def _say_stopping() -> None:
    """Print STOPPING: saving may take minutes. On a terminal it begins a line, below a progress bar."""
    with suppress(OSError):  # the terminal may be closed, which the signal may tell
        os.write(2, (b"\n" if os.isatty(2) else b"") + STOPPING.encode() + b"\n")


def _handled() -> list[signal.Signals]:
    """Return STOP_SIGNALS without a SIGHUP that is ignored."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or hangs_up]


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Block STOP_SIGNALS in processes that start in this context; the parent tells them to stop.

    A signal that comes to this process meanwhile is handled at the end of the context.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interruptible(after: str = STARTS_AGAIN) -> Iterator[None]:
    """Raise KeyboardInterrupt on each of the signals in this context: for work without steps.

    `after`: what the same command does afterwards; the exception's message.

    Only the first signal raises: another could interrupt while locks are held that workers wait for. A signal after
    _SAME_REQUEST_SECONDS ends the process immediately, and its workers with it.
    """
    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            raise KeyboardInterrupt(after)
        if time.monotonic() - first > _SAME_REQUEST_SECONDS:
            exit_at_once(f"stopped by a second signal; {after}.\n".encode(), KILLED)

    if stop_request.reason:
        raise KeyboardInterrupt(after)
    before = {number: signal.signal(number, interrupt) for number in _handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
