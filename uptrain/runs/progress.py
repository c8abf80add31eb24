"""Show the progress of training: bars on a terminal, otherwise a line every half minute."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from model.common.console import console, draws_bars, echo, format_bytes
from uptrain.training.loss_values import format_loss

_LINE_EVERY_SECONDS = 30.0
_SHORT_EVALUATION = 3.0
"""Seconds after which an evaluation gets a bar of its own."""
ProgressSink = Callable[[dict[str, Any]], None]


@contextmanager
def training_bar(steps: int) -> Iterator[ProgressSink]:
    """Yield a function that shows a record of `metrics.jsonl`; call it for each one written, and in evaluations."""
    if not draws_bars():
        yield _Lines(steps)
        return
    columns = (TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console(stderr=True)) as progress:
        task = progress.add_task("", total=steps, visible=False, what="Training")
        evaluation = _EvaluationBar(progress)

        def show(record: dict[str, Any]) -> None:
            if "evaluated" in record:
                evaluation.show(record)
                return
            evaluation.remove()
            if "loss" in record:
                progress.update(task, completed=record["step"], description=_short(record), visible=True)
            else:
                progress.update(task, completed=record["step"], visible=True)
                progress.console.print(_line(record))

        try:
            yield show
        finally:
            evaluation.remove()


class _EvaluationBar:
    """A bar below that of the training, while a long evaluation lasts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._begun = 0.0

    def show(self, record: dict[str, Any]) -> None:
        if self._task is None:
            self._begun = time.monotonic()
            self._task = self._progress.add_task("windows", total=record["of"], visible=False, what="Evaluating")
        is_long = time.monotonic() - self._begun >= _SHORT_EVALUATION
        self._progress.update(self._task, completed=record["evaluated"], visible=is_long)

    def remove(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


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
        if "evaluated" in record:
            return
        if "loss" in record:
            if now - self._last < _LINE_EVERY_SECONDS and record["step"] < self._steps:
                return
            self._last = now
        echo(_line(record), err=True)


def _short(record: dict[str, Any]) -> str:
    skipped = " (update skipped)" if record.get("skipped") else ""
    return f"loss {format_loss(record['loss'])} · {record['tokens_per_s']:,.0f} tokens/s{skipped}"


def _line(record: dict[str, Any]) -> str:
    if "evaluation" in record:
        means = record["evaluation"]
        text = f"step {record['step']}: held-out loss {format_loss(means['loss'])}"
        if "kl" in means:
            kl = format_loss(means["kl"], error=means["kl_error"])
            text += f", KL from the teacher {kl}, agreement {means['agreement']:.1%}"
        return text
    if "event" not in record:
        return f"step {record['step']}: {_short(record)}"
    if record["event"] in ("started", "resumed"):
        lines = [f"Not used: {problem}" for problem in record.get("rejected", ())]
        if "shared_bytes" in record:
            lines.append(f"Student and teacher share {format_bytes(record['shared_bytes'])} of parameters.")
        devices = f"{record['processes']} x {record['device']}"
        ready = f"READY: {record['event']} at step {record['step']} on {devices}; Ctrl-C saves and stops"
        return "\n".join([*lines, ready])
    return f"step {record['step']}: {record['event']}: {record['why']}"
