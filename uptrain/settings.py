"""What a run was asked for. Written to RUN/run.json, from which it is resumed, extended and exported."""

from dataclasses import dataclass

MICRO_BATCH_TOKENS = 8192
"""Tokens that a process takes at a time, unless told otherwise."""


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
