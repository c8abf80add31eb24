"""Read the history of a run from its folder, also while it is training. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from model.common.console import warn
from model.files.names import METRICS
from uptrain.budget.conversion_record import was_uptrained
from uptrain.runs.folder import MODEL, RUN_STATE, Run, read_run_state
from uptrain.training.loss_rise import MEASURABLE, rise_warning
from uptrain.training.losses import LOSSES
from uptrain.training.metrics_log import Record, read_metrics


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
    """`step`, `tokens`, the metrics of the evaluation, `conversion_cost` and `recovered_fraction`."""
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
            recovered = recovered_fraction(evaluations[0], evaluation) if starts_converted else None
            evaluation["conversion_cost"] = conversion_cost(evaluations[0]) if starts_converted else None
            evaluation["recovered_fraction"] = recovered
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


def recovered_fraction(first: Record, current: Record) -> float | None:
    """Return (loss after conversion - loss now) / (loss after conversion - teacher's loss).

    Return None if the conversion cost is unknown or below MEASURABLE, or if the loss now is not finite.
    """
    cost, after = conversion_cost(first), current["loss"]
    if cost is None or cost < MEASURABLE or after is None:
        return None
    return float((first["loss"] - after) / cost)


def format_recovered(fraction: float | None, cost: float | None) -> str | None:
    """Return the recovered fraction as text, or why there is none; None if the conversion cost is unknown."""
    if fraction is not None:
        return f"{fraction:.1%}"
    if cost is None or cost >= MEASURABLE:
        return None
    return f"none: the conversion cost less than {MEASURABLE:g} nats"


def conversion_cost(first: Record) -> float | None:
    """Return loss after conversion - teacher's loss, in nats per token.

    Return None without a teacher, without an evaluation before the first step, or if one of the losses is not finite.
    """
    before, target = first["loss"], first.get("teacher_loss")
    return None if first["step"] != 0 or before is None or target is None else float(before - target)
