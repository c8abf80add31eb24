"""Check single values from files and options. A wrong type or an impossible value gives one line that names the key.

Each function takes the value and its name as the message begins with it, such as `config.json has hidden_size`.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from model.common.errors import InvalidValueError

MAX_SIZE = 1 << 28
"""Largest size in a model's shapes: the bytes of a matrix of two such sizes fit into 64 bits."""
MAX_COUNT = 1 << 60
"""Largest value of any other count: it fits into 64 bits with room for sums."""
_SHOWN = 60
_READ = 4 * _SHOWN
"""Characters of a value's repr that are made at most, about."""


def short_repr(value: object) -> str:
    """Return a value on one line, cut to a readable length. Takes little time and memory for any value of JSON."""
    text = ""
    for part in _repr_parts(value):
        text += part
        if len(text) > _READ:
            break
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _repr_parts(value: object) -> Iterator[str]:
    """Yield the repr of a value in parts; a long string or number only in part."""
    if type(value) is dict:
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " * (i > 0)
            yield from _repr_parts(key)
            yield ": "
            yield from _repr_parts(item)
        yield "}"
    elif type(value) is list or type(value) is tuple:
        yield "[" if type(value) is list else "("
        for i, item in enumerate(value):
            yield ", " * (i > 0)
            yield from _repr_parts(item)
        yield "]" if type(value) is list else ",)" if len(value) == 1 else ")"
    elif isinstance(value, str | bytes):
        yield repr(value[:_READ])
    elif isinstance(value, int) and value.bit_length() > 4 * _READ:  # Python refuses to print some of these
        yield f"a number of {value.bit_length():,} bits"
    else:
        yield repr(value)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number that a float can hold. True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole_number(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least `least`. True and 8.0 are not whole numbers."""
    return type(value) is int and value >= least


def whole_number(value: object, name: str, least: int = 1, most: int = MAX_COUNT) -> int:
    """Return a whole number of the range. Raises InvalidValueError otherwise; True and 8.0 are not whole numbers."""
    if not is_whole_number(value, least):
        kind = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise InvalidValueError(f"{name} = {short_repr(value)}; it must be {kind}.")
    if value > most:
        raise InvalidValueError(f"{name} = {short_repr(value)}; it must be at most {most}.")
    return value


def size(value: object, name: str) -> int:
    """Return a size in a model's shapes. Raises InvalidValueError unless it is a whole number from 1 to MAX_SIZE."""
    return whole_number(value, name, most=MAX_SIZE)


def config_size(config: Mapping[str, Any], key: str) -> int:
    """Return a size in a `config.json`. Raises InvalidValueError as `size` does, and if the key is missing."""
    return size(config.get(key), f"config.json has {key}")


def number(value: object, name: str, above: float | None = None) -> float:
    """Return a finite number above `above`, or of at least 0 if `above` is None. Raises InvalidValueError otherwise."""
    if not is_finite(value) or (value < 0 if above is None else value <= above):
        kinds = {None: "a finite number of at least 0", 0.0: "a finite, positive number"}
        kind = kinds.get(above, f"a finite number above {above}")
        raise InvalidValueError(f"{name} = {short_repr(value)}; it must be {kind}.")
    return float(value)


def numbers(value: object, name: str) -> tuple[float, ...]:
    """Return a list of positive numbers. Raises InvalidValueError otherwise."""
    if not isinstance(value, list) or not all(is_finite(number) and number > 0 for number in value):
        raise InvalidValueError(f"{name} = {short_repr(value)}; it must be a list of positive numbers.")
    return tuple(map(float, value))


def flag(value: object, name: str) -> bool:
    """Return a boolean; null is false. Raises InvalidValueError for anything else."""
    if value is not None and not isinstance(value, bool):
        raise InvalidValueError(f"{name} = {short_repr(value)}; it must be true or false.")
    return bool(value)


def table(value: object, name: str) -> dict[str, Any]:
    """Return a copy of a JSON object; null is an empty one. Raises InvalidValueError for anything else."""
    if value is not None and not isinstance(value, dict):
        raise InvalidValueError(f"{name} = {short_repr(value)}; it must be an object.")
    return dict(value or {})
