"""What a run was asked for. Written to RUN/run.json, from which it is resumed, extended and exported."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from model.common import checks
from model.common.errors import InputError
from uptrain.budget.schedule import Schedule
from uptrain.training.losses import LOSSES

OPTIMIZERS = ("adamw", "adafactor")
TRAINABLE = ("all", "attention", "kv")
PRECISIONS = ("bf16", "fp32")
TRACKERS = ("tensorboard", "wandb")
MICRO_BATCH_TOKENS = 8192
"""Tokens that a process takes at a time, unless told otherwise."""
LONGEST_DEFAULT = 4096
"""Models of 100 000 tokens of context were pre-trained on shorter windows for most of their steps."""


def default_seq_len(config: Mapping[str, Any]) -> int:
    """Return the length of windows where none is given: the model's context, 4096 at most."""
    context = config.get("max_position_embeddings")
    if context is None:
        raise InputError("config.json does not say the model's context; give --seq-len.")
    return min(checks.whole_number(context, "config.json has max_position_embeddings", least=2), LONGEST_DEFAULT)


def default_micro_batch(seq_len: int) -> int:
    """Return windows that a process takes at a time."""
    return max(1, MICRO_BATCH_TOKENS // seq_len)


@dataclass(frozen=True)
class Settings:
    """The options of `uptrain run`, resolved: nothing here depends on defaults that a later version may change."""

    model: str
    """Where the weights came from; empty for a model trained from nothing."""
    data: str
    """The token cache."""
    loss: str
    steps: int
    global_batch: int
    """Windows of one optimizer step, over all processes."""
    micro_batch: int
    """Windows that one process takes at a time."""
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
    """In steps, as the following."""
    keep_last: int
    eval_every: int
    eval_data: str = ""
    teacher: str = ""
    original_steps: int = 0
    """Of the original pre-training, where the schedule goes on counting from them."""
    spike_sigma: float | None = None
    compile: bool = False
    activation_checkpointing: bool = False
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise InputError for values that no run has."""
        Schedule(self.schedule, self.lr, self.steps, self.warmup_steps, self.decay_fraction, self.original_steps)
        for name, choices in (
            ("loss", LOSSES), ("optimizer", OPTIMIZERS), ("trainable", TRAINABLE), ("precision", PRECISIONS),
        ):  # fmt: skip
            _check_choice(name, getattr(self, name), choices)
        for tracker in self.track:
            _check_choice("track", tracker, TRACKERS)
        for name in ("global_batch", "micro_batch", "save_every", "keep_last", "eval_every"):
            checks.whole_number(getattr(self, name), name)
        for name in ("seed", "original_steps"):
            checks.whole_number(getattr(self, name), name, least=0)
        checks.number(self.weight_decay, "weight_decay")
        if self.spike_sigma is not None:
            checks.number(self.spike_sigma, "spike_sigma", above=0.0)


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise InputError(f"{name} = {checks.show(value)}; it must be one of {', '.join(choices)}.")
