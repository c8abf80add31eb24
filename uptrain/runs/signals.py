"""Stopping on request: SIGTERM, SIGINT and SIGUSR1 ask for a save and an end; a second one ends at once.

The handlers only take note. The loop reads it where all processes can agree, once a step.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_REQUEST_SECONDS = 1.0
"""A launcher may pass on what the terminal has sent already; within this time it is one request."""
KILLED = 130


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self) -> None:
        self.reason = ""
        self._first = 0.0

    def install(self) -> None:
        """Take over the signals. Do so before slow imports: until then a signal kills."""
        for number in _SIGNALS:
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason and now - self._first > _SAME_REQUEST_SECONDS:
            os.write(2, b"stopped by a second signal, without saving.\n")
            os._exit(KILLED)
        if not self.reason:
            self.reason, self._first = signal.Signals(number).name, now


stop_request = StopRequest()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let each of the signals end what follows as Ctrl-C does: for work that has no steps and can be taken up again.

    Only the first interrupts: another could strike while locks are held that workers wait for. One that comes later
    than the same request would ends the process at once, and workers end with it.
    """
    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first > _SAME_REQUEST_SECONDS:
            os.write(2, b"stopped by a second signal; the same command continues where this one stopped.\n")
            os._exit(KILLED)

    if stop_request.reason:
        raise KeyboardInterrupt
    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
