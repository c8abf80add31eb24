"""Print errors, progress bars, tables and JSON for the command lines of `convert` and `uptrain`.

Exit codes: 0 success; 1 a failure midway (the same command resumes); 2 unacceptable input.
"""

import errno
import json
import math
import os
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import click
from rich.box import SIMPLE_HEAD
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

from model.common.errors import (
    InputError,
    RankError,
    RunError,
    is_device_error,
    is_lost_process,
    is_out_of_memory,
    is_shared_gpu,
)
from model.common.launcher_variables import is_local_main_process, leave_message, prints_errors
from model.common.printable import first_sentence, one_line, printable, printable_json

FAILED, BAD_INPUT = 1, 2
Advance = Callable[[float], None]
"""Moves a progress bar on, by an amount in its unit."""
MAX_LINE_LENGTH = 4000
"""Characters of a message. A name in an untrusted file may have millions."""
MIN_COLUMNS = {"tables": 80, "bars": 20}
"""Columns of the narrowest terminal that each is fitted to. One that is narrower wraps the lines of tables."""
EXTRA = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "matplotlib", "pyarrow")
"""The packages of INSTALL_EXTRA, by their import names."""
INSTALL_EXTRA = "in the folder of Groupwise, run pip install '.[torch]'"


class OrderedGroup(click.Group):
    """A group of commands listed in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def run(cli: click.Command, launched: bool = False) -> None:
    """Run a command line. Errors become one line on stderr and an exit code, without a traceback.

    `launched`: whether a launcher may have started many processes of it. They usually raise the same error, so the
    first one on each machine prints it. All leave their messages to the launcher, which prints those that the first
    did not (`leave_message`). A pipe that its reader has closed changes no exit code.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # not all encodings have the characters of the tables
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except SystemExit:  # of click, if a pipe is closed
        if not {"--help", "--version"} & set(sys.argv):  # which click prints itself
            raise
        code = 0
    except click.exceptions.NoArgsIsHelpError as error:
        echo(error.ctx.get_help() if error.ctx else "", err=True)
        code = BAD_INPUT
    except (Exception, KeyboardInterrupt) as error:
        message, code = _explain(error)
        if not launched or isinstance(error, RankError) or prints_errors():
            echo_line(f"Error: {message}")
        if (
            launched
            and not isinstance(error, (RankError, click.Abort, KeyboardInterrupt))
            and not is_lost_process(error)
        ):
            leave_message(message)
    # After a KeyboardInterrupt in a text that Python evaluated, as for a dataclass, `python -m` would end with the
    # signal instead of the code. CPython forgets that when it evaluates another text, as for a named tuple.
    namedtuple("_", "")
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, so that no file takes their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _explain(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code of an error that is no bug; raise any other."""
    if isinstance(error, click.ClickException):
        return _usage(error), BAD_INPUT
    if isinstance(error, InputError):
        return str(error), BAD_INPUT
    if isinstance(error, click.Abort) and isinstance(cause := error.__cause__ or error.__context__, EOFError):
        raise cause  # click takes one for Ctrl-D at a prompt, of which there is none here
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        reason = str(error.__cause__ or error)  # click raises Abort from the interrupt
        return f"interrupted; {reason or 'the same command starts again'}.", FAILED
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_working_directory():
        return "the working directory does not exist any more; change to another folder.", BAD_INPUT
    if isinstance(error, (RunError, OSError)):
        is_name_too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        return str(error), BAD_INPUT if is_name_too_long else FAILED
    if failure := _failure_of_machine(error):
        return failure, FAILED
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").partition(".")[0]) in EXTRA:
        return f"this needs {package}, which is not installed; {INSTALL_EXTRA}.", BAD_INPUT
    raise error


def _failure_of_machine(error: BaseException) -> str | None:
    """Return the message if memory, a GPU or another process failed; None for any other error."""
    if is_out_of_memory(error):
        reason = first_sentence(str(error))
        return f"not enough memory ({reason})." if reason else "not enough memory."
    if is_shared_gpu(error):
        return "two processes use the same GPU; start at most one process for each GPU."
    if is_device_error(error):
        return f"the GPU failed ({one_line(str(error).splitlines()[0])}); if it fails again, use another."
    if is_lost_process(error):
        return f"another process cannot be reached, and may have ended ({first_sentence(str(error))})."
    return None


def _has_working_directory() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _usage(error: click.ClickException) -> str:
    """Return click's message. It suggests only options that are spelled alike, and tells where all options are."""
    if isinstance(error, click.NoSuchOption):
        names = [name.lstrip("-") for name in error.possibilities or ()]  # with dashes, --lr is like --help
        if get_close_matches(error.option_name.lstrip("-"), names):
            return error.format_message()
        return f"{error.message}{_all_options(error)}"
    if isinstance(error, click.MissingParameter) and error.ctx:
        return f"{error.format_message()}{_all_options(error)}"
    if "unexpected extra argument" in error.message and _takes_many_texts(error):
        return f"{error.format_message().rstrip('.')}. Repeat --data for each file, or give the folder that holds them."
    return error.format_message()


def _all_options(error: click.UsageError) -> str:
    return f" `{error.ctx.command_path} --help` shows all options." if error.ctx else ""


def _takes_many_texts(error: click.ClickException) -> bool:
    """Return whether the command has an option --data that may be repeated. A shell's pattern gives it once."""
    command = error.ctx.command if isinstance(error, click.UsageError) and error.ctx else None
    return command is not None and any("--data" in p.opts and getattr(p, "multiple", False) for p in command.params)


@contextmanager
def _printing(stream: TextIO) -> Iterator[None]:
    """Print to a stream that may fail.

    Once the reader has closed the pipe, go on without output: the command's work and exit code stay what they are. So
    it is for other errors of stderr, such as a full disk. Those of stdout are a RunError.
    """
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except OSError as error:
        _discard(stream)
        if stream is not sys.stderr:
            raise RunError(
                f"only the result could not be printed ({error.strerror}); what was written is complete."
            ) from error


def _discard(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def draws_bars() -> bool:
    """Return whether this process shows progress as a bar. With FORCE_COLOR, rich would also fill a file with it."""
    return sys.stderr.isatty() and console(stderr=True).is_terminal and is_local_main_process()


def warn(message: str) -> None:
    """Print a warning on stderr."""
    echo_line(f"Warning: {message}")


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print text on stdout or stderr. Control characters, which file names may contain, are escaped."""
    _print(printable(text), err, nl)


def echo_line(text: str) -> None:
    """Print text on stderr as one line, even if names in it hold line breaks, without the middle of a very long one."""
    line = one_line(text)
    if len(line) > MAX_LINE_LENGTH:
        line = f"{line[: MAX_LINE_LENGTH // 2]} … {line[-MAX_LINE_LENGTH // 2 :]}"
    _print(line, err=True)


def print_json(result: Any) -> None:
    """Print a value as indented JSON, non-finite numbers as null."""
    _print(printable_json(json.dumps(null_non_finite(result), indent=2, ensure_ascii=False, allow_nan=False)))


def _print(text: str, err: bool = False, nl: bool = True) -> None:
    with _printing(sys.stderr if err else sys.stdout):
        click.echo(text, err=err, nl=nl)


def null_non_finite(value: Any) -> Any:
    """Replace every non-finite number in a value by None, because JSON has no non-finite numbers."""
    if isinstance(value, dict):
        return {name: null_non_finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [null_non_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_bytes(n: float) -> str:
    """Format a number of bytes in decimal units, as disks and the hub do."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


def format_duration(seconds: float) -> str:
    """Return a duration in words: `2 days 3 h`, `1 h 5 min`, `3 min`, `12 s`."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


class _Console(Console):
    """A console that escapes control characters in every string, also in tables."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        with _printing(sys.stderr if self.stderr else sys.stdout):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        _discard(sys.stderr if self.stderr else sys.stdout)


def console(stderr: bool = False) -> Console:
    """Return a console for tables, or for bars on stderr. It prints [brackets] as they are, which rich would read."""
    made = _Console(stderr=stderr, markup=False, emoji=False)
    if made.width < MIN_COLUMNS["bars" if stderr else "tables"]:  # COLUMNS may also be 0
        made.width = 80
    return made


@contextmanager
def progress_bar(label: str, total: float, quiet: bool, unit: str = "bytes") -> Iterator[Advance]:
    """Show a progress bar on stderr if that is a terminal and `quiet` is not set. Only the first process shows it."""
    screen = console(stderr=True)
    if quiet or not draws_bars():
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


def table_with_heading(title: str, padding: int | tuple[int, int, int, int] = (0, 1, 0, 0)) -> Table:
    """Return an empty table with a line below its headings. `padding`: of a cell (above, right, below, left)."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=padding)


def print_key_values(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of keys and values under a title."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)
