"""Define the options of `uptrain run` and the Settings they resolve to.

Settings are written to RUN/run.json, and read to resume, extend and export the run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from model.common import checks
from model.common.checks import MAX_COUNT
from model.common.errors import InputError
from uptrain.budget.budget import BudgetOptions
from uptrain.models.trainable_choices import TRAINABLE
from uptrain.training.learning_rate import Schedule
from uptrain.training.losses import LOSSES

OPTIMIZERS = ("adamw", "adafactor", "adamw8bit")
PRECISIONS = ("bf16", "fp32")
TRACKERS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class RunOptions:
    """Options of `uptrain run` as given; None stands for a default that depends on others."""

    budget: BudgetOptions
    model: Path | None
    init: Path | None
    """Folder of the config.json of a model to train from random weights. Exactly one of `model` and `init` is given."""
    data: tuple[str, ...]
    out: Path
    schedule: str
    optimizer: str
    weight_decay: float
    seed: int
    keep_last: int
    trainable: str | None = None
    lora_rank: int | None = None
    seq_len: int | None = None
    eval_data: str | None = None
    teacher: Path | None = None
    teacher_logits: Path | None = None
    loss: str | None = None
    warmup_steps: int | None = None
    precision: str | None = None
    micro_batch: int | None = None
    save_every: int | None = None
    eval_every: int | None = None
    spike_sigma: float | None = None
    compile: bool = False
    activation_checkpointing: bool = False
    track: tuple[str, ...] = ()
    max_minutes: float | None = None


@dataclass(frozen=True)
class Settings:
    """Resolved options of `uptrain run`: independent of defaults that a later version may change."""

    model: str
    """Folder of the initial weights; empty for a model trained from random weights."""
    data: str
    """Folder of the token cache."""
    loss: str
    steps: int
    global_batch: int
    """Windows of one optimizer step, over all processes."""
    micro_batch: int
    """Windows per forward pass of one process."""
    schedule: str
    lr: float
    """Peak learning rate."""
    warmup_steps: int
    decay_fraction: float
    optimizer: str
    weight_decay: float
    trainable: str
    precision: str
    seed: int
    save_every: int
    """Steps between checkpoints."""
    keep_last: int
    """Number of checkpoints to keep."""
    eval_every: int
    """Steps between evaluations."""
    lora_rank: int = 0
    """Rank of the adapters that are trained; 0 unless `trainable` is `lora`."""
    eval_data: str = ""
    teacher: str = ""
    teacher_logits: str = ""
    """Folder of the teacher's logits of `data`, in place of the teacher."""
    original_steps: int = 0
    """Optimizer steps of the original pre-training, which the schedule inverse-sqrt continues; 0 if unknown."""
    spike_sigma: float | None = None
    compile: bool = False
    activation_checkpointing: bool = False
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise InputError for invalid values."""
        _ = self.lr_schedule
        for name, choices in (
            ("loss", LOSSES), ("optimizer", OPTIMIZERS), ("trainable", TRAINABLE), ("precision", PRECISIONS),
        ):  # fmt: skip
            _check_choice(name, getattr(self, name), choices)
        if self.trainable != "all" and not self.model:
            raise InputError(f"--trainable {self.trainable} trains a part of MODEL; with --init, train all.")
        for tracker in self.track:
            _check_choice("track", tracker, TRACKERS)
        for name in ("global_batch", "micro_batch", "save_every", "keep_last", "eval_every"):
            checks.whole_number(getattr(self, name), name)
        checks.whole_number(self.lora_rank, "lora_rank", least=int(self.trainable == "lora"))
        checks.whole_number(self.steps * self.global_batch, "steps x global_batch", most=MAX_COUNT // 8)
        for name in ("seed", "original_steps"):
            checks.whole_number(getattr(self, name), name, least=0)
        checks.number(self.weight_decay, "weight_decay")
        if self.spike_sigma is not None:
            checks.number(self.spike_sigma, "spike_sigma", above=0.0)

    @cached_property
    def lr_schedule(self) -> Schedule:
        """The learning rate schedule. Raises InputError for invalid values, when the settings are made."""
        return Schedule(self.schedule, self.lr, self.steps, self.warmup_steps, self.decay_fraction, self.original_steps)


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise InputError(f"{name} = {checks.short_repr(value)}; it must be one of {', '.join(choices)}.")
