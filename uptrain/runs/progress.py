"""Show the progress of training: a bar on a terminal, otherwise a line every half minute."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from model.common.console import console, draws_bars, echo, size

_LINE_EVERY_SECONDS = 30.0
ProgressSink = Callable[[dict[str, Any]], None]


@contextmanager
def training_bar(steps: int) -> Iterator[ProgressSink]:
    """Yield a function that shows a record of `metrics.jsonl`; call it for each one written."""
    if not draws_bars():
        yield _Lines(steps)
        return
    columns = (TextColumn("Training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console(stderr=True)) as progress:
        task = progress.add_task("", total=steps, visible=False)

        def show(record: dict[str, Any]) -> None:
            if "loss" in record:
                progress.update(task, completed=record["step"], description=_short(record), visible=True)
            else:
                progress.update(task, completed=record["step"], visible=True)
                progress.console.print(_line(record))

        yield show


def without_errors(show: ProgressSink) -> ProgressSink:
    """Return `show` without its OSErrors: a closed pipe, or a log on a full disk, must not stop the training."""

    def show_if_possible(record: dict[str, Any]) -> None:
        with suppress(OSError):
            show(record)

    return show_if_possible


class _Lines:
    """Print events and evaluations, and a step every half minute."""

    def __init__(self, steps: int) -> None:
        self._steps, self._last = steps, 0.0

    def __call__(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if "loss" in record:
            if now - self._last < _LINE_EVERY_SECONDS and record["step"] < self._steps:
                return
            self._last = now
        echo(_line(record), err=True)


def _short(record: dict[str, Any]) -> str:
    skipped = " (update skipped)" if record.get("skipped") else ""
    return f"loss {record['loss']:.4f} · {record['tokens_per_s']:,.0f} tokens/s{skipped}"


def _line(record: dict[str, Any]) -> str:
    if "evaluation" in record:
        means = record["evaluation"]
        text = f"step {record['step']}: held-out loss {means['loss']:.4f}"
        if "kl" in means:
            text += f", KL from the teacher {means['kl']:.4f}, agreement {means['agreement']:.1%}"
        return text
    if "event" not in record:
        return f"step {record['step']}: {_short(record)}"
    if record["event"] in ("started", "resumed"):
        lines = [f"Not used: {problem}" for problem in record.get("rejected", ())]
        if "shared_bytes" in record:
            lines.append(f"Student and teacher share {size(record['shared_bytes'])} of parameters.")
        devices = f"{record['processes']} x {record['device']}"
        ready = f"READY: {record['event']} at step {record['step']} on {devices}; Ctrl-C saves and stops"
        return "\n".join([*lines, ready])
    return f"step {record['step']}: {record['event']}: {record['why']}"
