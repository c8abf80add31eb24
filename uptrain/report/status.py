"""Read the status of a run: progress, losses, speed and checkpoints. Needs no torch."""

import socket
import statistics
import time
from pathlib import Path
from typing import Any

from model.common.processes import is_running, pid_namespace
from model.files.names import CHECKPOINTS, METRICS
from uptrain.checkpoints.files import find_damage, is_kept_for_extend, list_checkpoints
from uptrain.report.history import History

SPEED_STEPS = 32
"""Number of last steps over which the speed is the median."""


def read_status(folder: Path, verify: bool) -> dict[str, Any]:
    """Return the status of a run, ready for JSON; `verify` checks all files of all checkpoints.

    Raises InputError if the folder is no run or is damaged.
    """
    history = History.read(folder)
    run, last = history.run, history.steps[-1] if history.steps else {}
    settings = run.settings
    speed = statistics.median(r["tokens_per_s"] for r in history.steps[-SPEED_STEPS:]) if history.steps else None
    return {
        "run": str(folder),
        **_state(history),
        "step": history.step,
        "total_steps": settings.steps,
        "share": history.step / settings.steps,
        "tokens": history.tokens,
        "total_tokens": run.budget.tokens,
        "alpha": run.budget.alpha,
        "objective": history.objective,
        **{name: last.get(name) for name in ("loss", "learning_rate", "grad_norm")},
        "tokens_per_s": speed,
        "seconds_left": (settings.steps - history.step) * run.budget.global_batch_tokens / speed if speed else None,
        "evaluation": history.evaluations[-1] if history.evaluations else None,
        "first_evaluation": history.evaluations[0] if history.evaluations else None,
        "warning": history.warning,
        "skipped_steps": history.skipped_steps,
        "not_saved_steps": history.steps_of("not saved"),
        "checkpoints": checkpoints(folder / CHECKPOINTS, verify),
        "parent": run.parent,
    }


def _state(history: History) -> dict[str, Any]:
    """Return the run's status and its reason. A running one without its process is "died".

    The processes of other machines and containers cannot be seen; `elsewhere` says that the run's is of one.
    """
    state = history.run_state
    status, pid, host = state.get("status", "not started"), state.get("pid"), state.get("host")
    # Two machines may give the name of a namespace alike, but not their own name.
    here = host in (None, socket.gethostname()) and state.get("pid_namespace") in ("", None, pid_namespace())
    if status == "running" and here and not is_running(state["pid"], state["started"]):
        status = "died"
    metrics = history.folder / METRICS
    # The clock of a shared disk may be ahead of this machine's.
    age = max(0.0, time.time() - metrics.stat().st_mtime) if metrics.exists() else None
    return {
        "status": status, "reason": state.get("reason", ""), "host": host, "pid": pid, "elsewhere": not here,
        "seconds_since_last_line": age,
    }  # fmt: skip


def checkpoints(folder: Path, verify: bool) -> list[dict[str, Any]]:
    """Return step, bytes, `kept_for_extend` and, with `verify`, damage of the complete checkpoints, oldest first.

    A checkpoint that the run removes meanwhile is not listed.
    """
    listed = []
    for step, path in list_checkpoints(folder).items():
        try:
            size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            entry: dict[str, Any] = {"step": step, "bytes": size, "kept_for_extend": is_kept_for_extend(path)}
            if verify:
                try:
                    entry["damage"] = find_damage(path)
                except OSError as error:
                    entry["damage"] = f"cannot be read: {error}"
        except FileNotFoundError:
            if path.exists():
                raise
        if path.exists():
            listed.append(entry)
    return listed
