"""Answer questions in JSON, a line each, from stdin to stdout. Runs in an engine's environment: no import of ours."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def settings() -> dict[str, Any]:
    """Return the worker's only argument, at its start: from here on, what the engine prints goes to stderr.

    If memory runs out, the kernel must kill this process first.
    """
    Path("/proc/self/oom_score_adj").write_text("1000")
    given: dict[str, Any] = json.loads(sys.argv[1])
    given["answers"] = os.dup(1)
    os.dup2(2, 1)
    return given


def serve(given: dict[str, Any], actions: dict[str, Callable[..., Any]]) -> None:
    """Call the named action for each line, until stdin ends."""
    with os.fdopen(given["answers"], "w") as answers:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            answer = actions[question.pop("do")](**question)
            print(json.dumps({"answer": answer}), file=answers, flush=True)


def serve_engine(given: dict[str, Any], server: object) -> None:
    """Answer questions by the methods of an engine's server."""
    serve(given, {name: getattr(server, name) for name in ("facts", "prefill", "open", "decode", "close")})


def clock_of(given: dict[str, Any]) -> Callable[[], float]:
    """Return the clock: seconds on the wall, or of processor time, which other processes do not lengthen."""
    return time.process_time if given["clock"] == "processor" else time.perf_counter
