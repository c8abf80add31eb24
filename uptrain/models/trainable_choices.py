"""The choices of `--trainable`, in a module of their own so that the command line starts without numpy and torch."""

from model.common.errors import InputError

TRAINABLE = ("all", "attention", "kv", "lora")
"""Choices of `--trainable`, in the order in which they are tried where memory is short."""
DEFAULT_LORA_RANK = 16
"""Rank of the adapters of `--trainable lora`."""


def resolve_lora_rank(chosen: int | None, trainable: str) -> int:
    """Return the rank of the adapters, 0 for parts without. Raises InputError for a chosen rank that is not used."""
    if chosen and trainable != "lora":
        raise InputError(f"--lora-rank is for --trainable lora, not {trainable}; leave one of the two out.")
    return (chosen or DEFAULT_LORA_RANK) if trainable == "lora" else 0


def check_lora_rank(lora_rank: int, largest: int) -> None:
    """Raise InputError for adapters of a higher rank than any matrix that is adapted."""
    if lora_rank > largest:
        raise InputError(f"--lora-rank {lora_rank} is more than {largest}, the largest rank of the model's matrices.")
