"""Add options to click commands, and collect their values in dataclasses."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


def add_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options to a command; `--help` lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def pop_fields(kind: type[T], options: dict[str, Any]) -> T:
    """Remove the fields of a dataclass from a command's options, and return them as that dataclass."""
    return kind(**{field.name: options.pop(field.name) for field in fields(kind)})  # type: ignore[arg-type]
