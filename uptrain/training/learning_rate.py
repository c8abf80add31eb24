"""Compute learning rates: pure functions of the step, independent of the world size, without state to save.

Every schedule is `peak` x warm-up x shape. The warm-up rises linearly to 1 and is above 0 at the first step. The shape
of wsd and cosine is 1 during the warm-up, and reaches its final value after the last step, so that no step has a
learning rate of 0. That of inverse-sqrt is 1 at step 0 and falls from there once pre-training has passed 10,000 steps.
"""

import math
from dataclasses import dataclass

from model.common.errors import InputError

COSINE_FLOOR = 0.1
T5_CONSTANT_STEPS = 10_000
WSD_DECAY_FRACTION = 0.2


@dataclass(frozen=True)
class Schedule:
    """Parameters of a learning rate schedule."""

    kind: str
    """One of `SCHEDULES`."""
    peak_lr: float
    total_steps: int
    """Optimizer steps."""
    warmup_steps: int
    """Optimizer steps; 0 for none."""
    decay_fraction: float = WSD_DECAY_FRACTION
    """wsd: fraction of the steps, at the end, in which the learning rate decays."""
    original_steps: int = 0
    """inverse-sqrt: optimizer steps of the original pre-training, which the schedule continues."""

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise InputError(f"the schedule {self.kind!r} is unknown; choose one of {', '.join(SCHEDULES)}.")
        if not (math.isfinite(self.peak_lr) and self.peak_lr > 0):
            raise InputError(f"the peak learning rate is {self.peak_lr}; it must be above 0.")
        if self.total_steps < 1:
            raise InputError(f"a run of {self.total_steps} steps trains nothing; give it 1 or more.")
        if not 0 <= self.decay_fraction <= 1:
            raise InputError(f"the decay fraction is {self.decay_fraction}; it is a share of the steps, 0 to 1.")
        stable_end = _wsd_decay_start(self) if self.kind == "wsd" else self.total_steps
        if not 0 <= self.warmup_steps <= stable_end:
            raise InputError(
                f"{self.warmup_steps} warm-up steps do not fit: the schedule {self.kind} of {self.total_steps} steps "
                f"has room for 0 to {stable_end}."
            )


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0."""
    assert 0 <= step < schedule.total_steps, (step, schedule)
    warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    return schedule.peak_lr * warmup * _SHAPES[schedule.kind](schedule, step)


def default_warmup(total_steps: int) -> int:
    """Return 5 % of the steps, but at least 100 or a quarter of the steps, whichever is less."""
    return max(round(0.05 * total_steps), min(100, total_steps // 4))


def decay_start(schedule: Schedule) -> int | None:
    """Return the step at which wsd begins to decay; None for the other schedules.

    The checkpoint of that step does not depend on `total_steps`. A longer run with the same warm-up has the same one,
    so runs are extended from it.
    """
    return _wsd_decay_start(schedule) if schedule.kind == "wsd" else None


def _wsd_decay_start(schedule: Schedule) -> int:
    return schedule.total_steps - round(schedule.decay_fraction * schedule.total_steps)


def _wsd(schedule: Schedule, step: int) -> float:
    """Warm-up, stable, decay: 1 - sqrt(finished fraction of the decay), to 0 (Hägele et al. 2024, section 3)."""
    start = _wsd_decay_start(schedule)
    return 1.0 if step <= start else 1 - math.sqrt((step - start) / (schedule.total_steps - start))


def _cosine(schedule: Schedule, step: int) -> float:
    """Half a cosine from the end of the warm-up, to 10 % (Touvron et al. 2023, section 2.2)."""
    if step <= schedule.warmup_steps:
        return 1.0
    done = (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps)
    return COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * done)) / 2


def _constant(schedule: Schedule, step: int) -> float:
    return 1.0


def _inverse_sqrt(schedule: Schedule, step: int) -> float:
    """1/sqrt(max(n, 10,000)) at step n of pre-training (Raffel et al. 2020, section 3.1.2), relative to step 0.

    GQA's uptraining continues it after n = 1,000,000 (Ainslie et al. 2023, section 2.1), where it is nearly constant:
    5 % more steps take it to 97.6 %. That is `original_steps=1_000_000`. With 0, n starts at 0, and the learning rate
    is constant for 10,000 steps.
    """
    first, current = (max(n, T5_CONSTANT_STEPS) for n in (schedule.original_steps, schedule.original_steps + step))
    return math.sqrt(first / current)


_SHAPES = {"wsd": _wsd, "cosine": _cosine, "constant": _constant, "inverse-sqrt": _inverse_sqrt}
SCHEDULES = tuple(_SHAPES)
EXTENDABLE = ("wsd", "constant", "inverse-sqrt")
"""Schedules whose learning rates do not depend on the length of the run; wsd only until it decays (`decay_start`)."""
