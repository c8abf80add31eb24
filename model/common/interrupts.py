"""Turn signals into KeyboardInterrupt, but never in the middle of an import.

There, an exception may be lost: numpy takes KeyboardInterrupt for a failed import of one of its modules, and the
program goes on with half of numpy. So a signal during an import ends the process at once. It leaves what a killed
process leaves.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

from model.common.launcher_variables import prints_errors

FAILED = 1
_SHOW_CURSOR = b"\x1b[?25h\n"


def install(*numbers: signal.Signals) -> None:
    """Raise KeyboardInterrupt on the signals. One that is ignored, such as SIGHUP under `nohup`, stays ignored."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        exit_at_once(b"Error: interrupted; the same command starts again.\n" if prints_errors() else b"", FAILED)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def exit_at_once(message: bytes, code: int) -> None:
    """End the process. A progress bar has hidden the cursor of a terminal."""
    with suppress(OSError):  # the terminal may be closed, which the signal may tell
        os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + message)
    os._exit(code)
