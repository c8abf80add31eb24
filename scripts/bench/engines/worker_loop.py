"""Answer questions in JSON, a line each, from stdin to stdout. Runs in an engine's environment: no import of ours."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(actions: dict[str, Callable[..., Any]]) -> None:
    """Call the named action for each line, until stdin ends. What the engine prints goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            answer = actions[question.pop("do")](**question)
            print(json.dumps({"answer": answer}), file=answers, flush=True)


def settings() -> dict[str, Any]:
    """Return the worker's only argument. If memory runs out, the kernel shall end this process before others."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def clock_of(given: dict[str, Any]) -> Callable[[], float]:
    """Return the clock: seconds on the wall, or of processor time, which other processes do not lengthen."""
    return time.process_time if given["clock"] == "processor" else time.perf_counter
