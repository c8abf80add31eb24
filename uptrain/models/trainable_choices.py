"""The choices of `--trainable`, in a module of their own so that the command line starts without numpy and torch."""

TRAINABLE = ("all", "attention", "kv", "lora")
"""Choices of `--trainable`, in the order in which they are tried where memory is short."""
DEFAULT_RANK = 16
"""Rank of the adapters of `--trainable lora`."""
