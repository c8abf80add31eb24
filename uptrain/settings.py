"""What a run was asked for. Written to RUN/run.json, from which it is resumed, extended and exported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import InputError

MICRO_BATCH_TOKENS = 8192
"""Tokens that a process takes at a time, unless told otherwise."""
LONGEST_DEFAULT = 4096
"""Models of 100 000 tokens of context were pre-trained on shorter windows for most of their steps."""


def default_seq_len(config: Mapping[str, Any]) -> int:
    """Return the length of windows where none is given: the model's context, 4096 at most."""
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 2:
        raise InputError("config.json does not say the model's context; give --seq-len.")
    return min(context, LONGEST_DEFAULT)


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
