"""Read the history of a run from its folder, also while it is training. Needs no torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from model.common.console import warn
from model.files.names import METRICS
from uptrain.budget.conversion_record import was_uptrained
from uptrain.runs.run_folder import MODEL, RUN_STATE, Run, read_run_state
from uptrain.training.loss_rise import MEASURABLE, rise_warning
from uptrain.training.losses import LOSSES
from uptrain.training.metrics_log import Record, read_metrics

MAX_RECOVERED_ERROR = 0.1
"""Largest standard error with which a recovered fraction is shown."""


@dataclass(frozen=True)
class History:
    """Settings of a run, and its metrics by kind."""

    folder: Path
    run: Run
    run_state: Record
    """Content of run_state.json; empty before the first start."""
    steps: list[Record]
    """Records of steps from the metrics. Numbers that were not finite are None, also in evaluations."""
    evaluations: list[Record]
    """`step`, `tokens`, the metrics of the evaluation, and what `recovery` returns."""
    events: list[Record]
    warning: str | None
    """Warning that the loss rose."""

    @classmethod
    def read(cls, folder: Path) -> "History":
        """Read the folder of a run; warn if its metrics have lost lines. Raises InputError if a file is damaged."""
        run, run_state = Run.read(folder), read_run_state(folder / RUN_STATE)
        records = read_metrics(folder / METRICS)
        steps = [r for r in records if "loss" in r]
        if problem := _lost_lines(folder, run_state.get("step", 0), steps[-1]["step"] if steps else 0):
            warn(problem)
        tokens = {0: 0, **{r["step"]: r["tokens"] for r in steps}}
        evaluations = [
            {**r["evaluation"], "step": r["step"], "tokens": tokens[r["step"]]}
            for r in records
            if "evaluation" in r and r["step"] in tokens
        ]
        starts_converted = bool(run.settings.model) and not was_uptrained(folder / MODEL)
        for evaluation in evaluations:
            recovered = recovery(evaluations[0], evaluation)
            evaluation.update(recovered if starts_converted else dict.fromkeys(recovered))
        warning = rise_warning(records, run.settings.lr, bool(run.settings.teacher_logits))
        return cls(folder, run, run_state, steps, evaluations, [r for r in records if "event" in r], warning)

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return int(self.steps[-1]["step"] if self.steps else 0)

    @property
    def tokens(self) -> int:
        """Number of training tokens so far."""
        return int(self.steps[-1]["tokens"] if self.steps else 0)

    @property
    def objective(self) -> str:
        """Description of the training loss."""
        return LOSSES[self.run.settings.loss]

    def steps_of(self, event: str) -> list[int]:
        """Return the steps of all events with this name."""
        return [e["step"] for e in self.events if e["event"] == event]

    @property
    def skipped_steps(self) -> list[int]:
        """Steps whose update was skipped, counted from 1 like `step` in the metrics."""
        return [r["step"] for r in self.steps if r.get("skipped")]


def _lost_lines(folder: Path, step: int, last: int) -> str:
    """Return a warning if the metrics end at the step `last`, before that of run_state.json; "" if they do not."""
    if step <= last:
        return ""
    metrics = folder / METRICS
    if not metrics.exists():
        return f"{metrics} is missing; restore it. Without it, the steps and losses are not known."
    return (
        f"{metrics} ends at step {last:,}, but the run has been at step {step:,}; restore the file. Without its lines, "
        "the steps and losses after that are not known."
    )


def recovery(first: Record, current: Record) -> Record:
    """Return `conversion_cost`, `recovered_fraction` and `recovered_fraction_error`, each None if it is unknown."""
    return {
        "conversion_cost": conversion_cost(first),
        "recovered_fraction": recovered_fraction(first, current),
        "recovered_fraction_error": recovered_fraction_error(first, current),
    }


def recovered_fraction(first: Record, current: Record) -> float | None:
    """Return (loss after conversion - loss now) / (loss after conversion - teacher's loss).

    Return None if the conversion cost is unknown or below MEASURABLE, if the loss now is not finite, or if the standard
    error of the fraction exceeds MAX_RECOVERED_ERROR.
    """
    error = recovered_fraction_error(first, current)
    return None if error is not None and error > MAX_RECOVERED_ERROR else _recovered_fraction(first, current)


def recovered_fraction_error(first: Record, current: Record) -> float | None:
    """Return the standard error of the recovered fraction; None if it is unknown, as in runs of earlier versions.

    If only the first evaluation is of an earlier version, its error counts as 0.

    The fraction is R = 1 - G / C, with G the loss now and C the loss after conversion, both above the teacher's. The
    delta method gives √(s_G² + (1 - R)² s_C²) / C. It is assumed that G and C are not correlated, since only the error
    of each is stored. Windows on which conversion cost more than on others usually keep more of it. So the error is
    usually smaller.
    """
    fraction, cost = _recovered_fraction(first, current), conversion_cost(first)
    cost_error, error = first.get("above_teacher_error") or 0.0, current.get("above_teacher_error")
    if fraction is None or cost is None or error is None:
        return None
    if current["step"] == first["step"]:  # 0 by definition
        return 0.0
    return math.hypot(error, (1 - fraction) * cost_error) / cost


def _recovered_fraction(first: Record, current: Record) -> float | None:
    """Return the recovered fraction, whatever its standard error."""
    cost, after = conversion_cost(first), current["loss"]
    if cost is None or cost < MEASURABLE or after is None:
        return None
    return float((first["loss"] - after) / cost)


def format_recovered(evaluation: Record) -> str | None:
    """Return the recovered fraction as text, or why there is none; None if the conversion cost is unknown.

    `evaluation` has what `recovery` returns.
    """
    fraction, error = evaluation["recovered_fraction"], evaluation["recovered_fraction_error"]
    if fraction is not None:
        return f"{fraction:.1%}" if error is None else f"{fraction:.1%} ± {error:.1%}"
    if error is not None:
        return f"none: too little held-out text (its standard error is {error:.0%})"
    cost = evaluation["conversion_cost"]
    if cost is None or cost >= MEASURABLE:
        return None
    return f"none: the conversion cost less than {MEASURABLE:g} nats"


def conversion_cost(first: Record) -> float | None:
    """Return loss after conversion - teacher's loss, in nats per token.

    Return None without a teacher, without an evaluation before the first step, or if one of the losses is not finite.
    """
    before, target = first["loss"], first.get("teacher_loss")
    return None if first["step"] != 0 or before is None or target is None else float(before - target)
