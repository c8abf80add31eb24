"""Tell whether a process that a file names still runs."""

import os
from pathlib import Path

import psutil

SAME_PROCESS = 1.0
"""Seconds by which two readings of the start of a process may differ."""


def process_start(pid: int) -> float | None:
    """Return when a process began, in seconds since the machine did; None if that cannot be read.

    A change of the clock does not change it.
    """
    try:
        booted = psutil.boot_time()  # before the other, which adds it
        return float(round(psutil.Process(pid).create_time() - booted, 2))
    except (psutil.Error, OSError, RuntimeError):  # no such process, one of another user, or a hidden /proc/stat
        return None


def is_running(pid: int, started: float | None) -> bool:
    """Return whether a process still runs that began at a time. Another may have its id since it ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process belongs to another user
        return True
    now = process_start(pid)
    return started is None or now is None or abs(now - started) < SAME_PROCESS


def pid_namespace() -> str:
    """Return the namespace of process ids, which differs between containers; "" outside Linux."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
