"""What a run has done so far, as its folder tells; also while the run goes on, and without torch."""

from dataclasses import dataclass
from pathlib import Path

from model.common import checks
from model.common.errors import InputError
from model.common.read_files import CONFIG_BYTES, read_bytes_up_to
from model.common.typed_json import check_types, parse_object
from uptrain.runs.folder import METRICS, STATE, Run
from uptrain.runs.metrics_log import Record, read_metrics
from uptrain.training.losses import LOSSES

STATE_TYPES = {"status": str, "step": int, "reason": str, "pid": int}
MOST_PID = 2**31 - 1


@dataclass(frozen=True)
class History:
    """A run's settings, and its metrics sorted by kind."""

    folder: Path
    run: Run
    state: Record
    """What run_state.json holds; empty before the first start."""
    steps: list[Record]
    """As in the metrics; a number that was not finite is None, also in evaluations."""
    evaluations: list[Record]
    """`step`, `tokens`, the measures as they are in the metrics, and `recovered_fraction`."""
    events: list[Record]

    @classmethod
    def read(cls, folder: Path) -> "History":
        run = Run.read(folder)
        records = read_metrics(folder / METRICS)
        steps = [r for r in records if "loss" in r]
        tokens = {0: 0, **{r["step"]: r["tokens"] for r in steps}}
        evaluations = [
            {"step": r["step"], "tokens": tokens[r["step"]], **r["evaluation"]}
            for r in records
            if "evaluation" in r and r["step"] in tokens
        ]
        for found in evaluations:
            found["recovered_fraction"] = recovered_fraction(evaluations[0], found) if run.settings.model else None
        return cls(folder, run, _read_state(folder / STATE), steps, evaluations, [r for r in records if "event" in r])

    @property
    def step(self) -> int:
        """How many steps are finished."""
        return int(self.steps[-1]["step"] if self.steps else 0)

    @property
    def tokens(self) -> int:
        """How many tokens it has trained on."""
        return int(self.steps[-1]["tokens"] if self.steps else 0)

    @property
    def objective(self) -> str:
        """What the training loss is, in words."""
        return LOSSES[self.run.settings.loss]

    def steps_of(self, event: str) -> list[int]:
        """Return the steps at which such an event happened."""
        return [e["step"] for e in self.events if e["event"] == event]

    @property
    def skipped_steps(self) -> list[int]:
        """The steps whose update was left out, counted from 1 like `step` in the metrics."""
        return [r["step"] for r in self.steps if r.get("skipped")]


def recovered_fraction(first: Record, now: Record) -> float | None:
    """Return (loss after conversion - loss now) / (loss after conversion - teacher's loss).

    None without a teacher, without an evaluation before the first step, if the conversion had cost nothing, or if one
    of the losses was not finite.
    """
    before, after, goal = first["loss"], now["loss"], now.get("teacher_loss")
    if first["step"] != 0 or before is None or after is None or goal is None or before <= goal:
        return None
    return float((before - after) / (before - goal))


def _read_state(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        state = check_types(parse_object(read_bytes_up_to(path, CONFIG_BYTES)), STATE_TYPES)
        checks.whole_number(state["pid"], "pid", most=MOST_PID)
    except InputError as error:
        why = str(error).rstrip(".")
        raise InputError(f"{path} is damaged ({why}); `uptrain resume {path.parent}` writes it anew.") from error
    return state
