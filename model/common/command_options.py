"""Add options to click commands, and collect their values in dataclasses. Define the options of several packages."""

import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import click

from model.common.checks import MAX_COUNT, is_finite, short_repr
from model.common.counts import parse_count
from model.common.errors import InputError
from model.files.paths import home_problem

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

AUTO_DEVICE = "auto"
"""Stands for the best device that torch finds (`model.decoder.devices.find_device`)."""


class PathType(click.Path):
    """The type of a path, whose value is a pathlib.Path.

    Refuses an empty one, which is what an unset variable of the shell gives, and which pathlib takes for the working
    directory. Refuses one that begins with ~, which would make a folder of this name.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(path_type=Path, **attributes)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if value == "":
            self.fail("The path is empty. Is a variable of the shell unset?", parameter, context)
        if problem := home_problem(str(value)):
            self.fail(problem, parameter, context)
        return super().convert(value, parameter, context)


class SizeType(click.ParamType[int]):
    """The type of a number of bytes, such as `24GB`, `500MB`, `2GiB` or `4096`. Its value is an int.

    `least`: the smallest value. One above 1 refuses numbers whose unit was forgotten.
    """

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE | re.ASCII)
        size = 0
        if match:
            number, unit, binary = match.groups()
            size = int(Fraction(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
        if 0 < size < self.least:
            self.fail(
                f"{short_repr(value)} is less than {self.least:,} bytes; give a unit, for example 24GB, 500MB or 2GiB.",
                parameter, context,
            )  # fmt: skip
        if not 0 < size <= MAX_COUNT:
            self.fail(f"{short_repr(value)} is not a size; write for example 24GB, 500MB or 2GiB.", parameter, context)
        return size


class CountType(click.ParamType[int]):
    """The type of a number of tokens or steps, such as `4096`, `4K` or `50B`. Its value is an int."""

    name = "count"

    def __init__(self, least: int = 1, most: int = MAX_COUNT) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return parse_count(str(value), self.least, self.most)
        except InputError as error:
            self.fail(str(error), parameter, context)


class WholeNumber(click.IntRange):
    """The type of a whole number of a range."""

    name = "whole number"  # in click's messages

    def _describe_range(self) -> str:
        """Return the range for the help and for messages, without the 19 digits of MAX_COUNT."""
        return super()._describe_range().replace(str(MAX_COUNT), f"2^{MAX_COUNT.bit_length() - 1}")


def json_option(text: str = "Print the result as JSON, without a progress bar.") -> Callable[[Command], Command]:
    """Return the option `--json`, whose value is `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def device_option(purpose: str) -> Callable[[Command], Command]:
    """Return the option --device. `purpose`: a verb phrase for the help."""
    return click.option(
        "--device", default=AUTO_DEVICE, show_default=True, metavar="auto|cpu|cuda|cuda:N|mps",
        help=f"Device to {purpose}. auto: a GPU if torch finds one, else the CPU.",
    )  # fmt: skip


def add_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options to a command; `--help` lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def pop_fields(kind: type[T], options: dict[str, Any]) -> T:
    """Remove the fields of a dataclass from a command's options, and return them as that dataclass."""
    return kind(**{field.name: options.pop(field.name) for field in fields(kind)})  # type: ignore[arg-type]


class RenamedOption(click.Option):
    """An option that was renamed. The earlier name works too, but is not in the help."""

    def __init__(self, names: list[str], **attributes: Any) -> None:
        self.earlier = names[1]
        super().__init__(names, **attributes)

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        shown = copy(self)
        shown.opts = [name for name in self.opts if name != self.earlier]
        return click.Option.get_help_record(shown, context)


class SingleOption(click.Option):
    """An option that is refused if it is given more than once, for texts: click would drop all but the last."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:  # fmt: skip
        given = opts.get(self.name or "")
        if isinstance(given, list):
            if len(given) > 1:
                raise click.UsageError(
                    f"{self.opts[0]} is given {len(given)} times, but takes one text; put the texts into one folder, "
                    "or prepare a cache of them (uptrain prepare).",
                    ctx,
                )
            opts = {**opts, self.name or "": given[0]}
        return super().handle_parse_result(ctx, opts, args)


class FiniteFloat(click.FloatRange):
    """A float option of a range. NaN, which `click.FloatRange` accepts, and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not is_finite(number := super().convert(value, param, ctx)):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """Return the range for the help; without bounds, click would show `x<=None`."""
        return "" if self.min is None and self.max is None else super()._describe_range()


class ShareType(FiniteFloat):
    """The type of a share, such as `0.05`. A percentage is refused with the share that it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?%", value, re.ASCII)):
            self.fail(f"give a share: {float(match[1]) / 100:.6g} for {match[1]} %.", param, ctx)
        return super().convert(value, param, ctx)


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options under headings."""

    def __init__(self, *arguments: Any, headings: dict[str, tuple[str, ...]], **attributes: Any) -> None:
        """`headings`: the names of the options under each heading. Those under none come last."""
        super().__init__(*arguments, **attributes)
        self._headings = headings

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            p.opts[0].lstrip("-"): p.get_help_record(ctx) for p in self.get_params(ctx) if isinstance(p, click.Option)
        }
        named = {name for names in self._headings.values() for name in names}
        for heading, names in {**self._headings, "Other": tuple(name for name in records if name not in named)}.items():
            rows = [record for name in names if (record := records[name]) is not None]
            with formatter.section(heading):
                formatter.write_dl(rows)
