"""Run `uptrain` with shards on CPUs, and write the peak of each process's anonymous memory while it trains.

torchrun … measured_shards.py FOLDER ARGUMENTS…        writes FOLDER/RANK
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsdp_on_cpu  # noqa: F401

import uptrain.runs.start_and_resume
from uptrain.cli import cli

_train = uptrain.runs.start_and_resume.train


def _measured(*arguments: Any) -> Any:
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        return _train(*arguments)
    finally:
        done.set()
        thread.join()
        (Path(sys.argv[1]) / os.environ["RANK"]).write_text(str(peak))


def anonymous() -> int:
    """Return the bytes of this process's anonymous memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    uptrain.runs.start_and_resume.train = _measured
    cli.main(sys.argv[2:], standalone_mode=False)
