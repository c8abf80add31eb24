"""Checks of single values that others wrote: a wrong type or an impossible value is one line that names the key.

Each takes the value, and its name as the message begins with it: `config.json has hidden_size`.
"""

import sys
from typing import Any, TypeGuard

import click

from model.common.errors import CheckpointError

LARGEST_SIZE = 1 << 28
"""Of what a model's shapes are made of: the bytes of a matrix of two such sizes still fit into 64 bits."""
LARGEST_COUNT = 1 << 60
"""Of anything else: it fits into 64 bits with room for sums."""
_SHOWN = 60


def show(value: object) -> str:
    """Return a value on one line, cut to a length that can be read."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_finite(value: object) -> TypeGuard[int | float]:
    """Say whether a value is a number that a float can hold. True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def whole_number(value: object, name: str, least: int = 1, most: int = LARGEST_COUNT) -> int:
    """Return a whole number of the range. True and 8.0 are none. Raises CheckpointError."""
    if type(value) is not int or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number from {least} on"
        raise CheckpointError(f"{name} = {show(value)}; it must be {kind}.")
    if value > most:
        raise CheckpointError(f"{name} = {show(value)}; it must be at most {most}.")
    return value


def size(value: object, name: str) -> int:
    """Return a size that a model's shapes are made of. Raises CheckpointError."""
    return whole_number(value, name, most=LARGEST_SIZE)


def number(value: object, name: str, above: float | None = None) -> float:
    """Return a finite number greater than `above`, or, where that is None, not below 0. Raises CheckpointError."""
    if not is_finite(value) or (value < 0 if above is None else value <= above):
        kinds = {None: "a finite number from 0 on", 0.0: "a finite, positive number"}
        kind = kinds.get(above, f"a finite number above {above}")
        raise CheckpointError(f"{name} = {show(value)}; it must be {kind}.")
    return float(value)


def flag(value: object, name: str) -> bool:
    """Return true or false; null is false. Raises CheckpointError."""
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{name} = {show(value)}; it must be true or false.")
    return bool(value)


def table(value: object, name: str) -> dict[str, Any]:
    """Return a copy of an object; null is an empty one. Raises CheckpointError."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name} = {show(value)}; it must be an object.")
    return dict(value or {})


class FiniteFloat(click.FloatRange):
    """A float option of a range, outside of which are NaN, which `click.FloatRange` lets pass, and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not is_finite(found := super().convert(value, param, ctx)):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found
