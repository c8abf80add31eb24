"""Print errors, progress bars, tables and JSON for the command lines of `convert` and `uptrain`.

Exit codes: 0 success; 1 a failure midway (the same command resumes); 2 unacceptable input.
"""

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from model.common.errors import InputError, RankError, RunError
from model.common.printable import one_line, printable, printable_json

FAILED, BAD_INPUT = 1, 2
EXTRA = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "matplotlib")
"""The packages of `pip install 'groupwise[torch]'`, by their import names."""


class OrderedGroup(click.Group):
    """A group of commands listed in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def run(cli: click.Command) -> None:
    """Run a command line. Errors become one line on stderr and an exit code, without a traceback."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        echo(error.ctx.get_help() if error.ctx else "", err=True)
        sys.exit(BAD_INPUT)
    except click.ClickException as error:
        _fail(error.format_message(), BAD_INPUT)
    except InputError as error:
        _fail(str(error), BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted; the same command continues where this one stopped.", FAILED)
    except RankError as error:
        _fail(str(error), FAILED, alone=True)
    except (RunError, OSError) as error:
        is_name_too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        _fail(str(error), BAD_INPUT if is_name_too_long else FAILED)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        _fail(f"this needs {package}, which is not installed; install it: pip install 'groupwise[torch]'.", BAD_INPUT)


def _fail(message: str, code: int, alone: bool = False) -> None:
    # All processes usually raise the same error, so one on each machine prints it.
    if alone or os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        echo_line(f"Error: {message}")
    sys.exit(code)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    echo_line(f"Warning: {message}")


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print text on stdout or stderr. Control characters, which file names may contain, are escaped."""
    click.echo(printable(text), err=err, nl=nl)


def echo_line(text: str) -> None:
    """Print text on stderr as one line, even if names in it contain line breaks."""
    click.echo(one_line(text), err=True)


def print_json(result: Any) -> None:
    """Print a value as indented JSON, non-finite numbers as null."""
    click.echo(printable_json(json.dumps(null_non_finite(result), indent=2, ensure_ascii=False, allow_nan=False)))


def null_non_finite(value: Any) -> Any:
    """Replace every non-finite number in a value by None, because JSON has no non-finite numbers."""
    if isinstance(value, dict):
        return {name: null_non_finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [null_non_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def size(n: float) -> str:
    """Format a number of bytes in decimal units, as disks and the hub do."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class _Console(Console):
    """A console that escapes control characters in every string, also in tables."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def console(stderr: bool = False) -> Console:
    """Return a console for tables. It prints [brackets] as they are instead of reading them as rich's markup."""
    return _Console(stderr=stderr, markup=False, emoji=False)


@contextmanager
def progress_bar(label: str, total: float, quiet: bool, unit: str = "bytes") -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr, unless stderr is not a terminal or `quiet` is set."""
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda n: None
        return
    amounts = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), *amounts, TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)


def print_columns(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table whose rows begin with a label, and whose other columns are numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_key_values(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of keys and values under a title."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)
