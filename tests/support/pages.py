"""The commands in the pages of the documentation: their places, and the programs that parse and run them."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import click
from click.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted(ROOT.glob("docs/**/*.md"))]
SHELLS, PYTHON, OTHERS = ("sh", "bash", "console"), "python", ("", "json", "text", "toml", "yaml")
"""The languages of fenced blocks: commands, Python, and those that hold neither."""
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
PACKAGES = ("convert", "model", "scripts", "uptrain")
OPTIONS_OF_PYTEST = ("--gpu",)
"""Those that pages give to `scripts/test`."""
Words = Sequence[str]


class UnknownCommandError(Exception):
    """A command of a page that does not exist, or not with these options."""


@dataclass(frozen=True)
class PageCommand:
    """A command of a page, without its comment. `promised` is the line below it that begins with `# `."""

    place: str
    text: str
    promised: str | None = None

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.text) if not re.match(r"[A-Z_]+=", word)]

    def begins_with(self, *beginnings: str) -> bool:
        """Return whether the first words are one of these; the last of them may be a package of what is named."""
        line = " ".join(self.words) + " "
        return any(line.startswith((f"{beginning} ", f"{beginning}.")) for beginning in beginnings)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `place` is the page and the line of its fence."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[PageCommand]:
        """Return the commands of a shell block. A line of `a && b` holds two."""
        commands: list[PageCommand] = []
        for number, line in enumerate(self.text.replace("\\\n", "  ").splitlines(), self.line + 1):
            if self.language == "console" and not line.startswith("$ "):
                continue  # output
            if line.startswith("# ") and commands and commands[-1].promised is None:
                commands[-1] = PageCommand(commands[-1].place, commands[-1].text, line[2:])
            without_comment = re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip()
            parts = re.split(r"\s(?:&&|\|\||\||;)\s", without_comment)
            commands += [PageCommand(f"{self.page}:{number}", part.strip()) for part in parts if part.strip()]
        return commands


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks of all pages in these languages, or in all."""
    all_blocks = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            content = "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
            line = text.count("\n", 0, match.start()) + 1
            all_blocks.append(Block(page.relative_to(ROOT).as_posix(), line, match[2], content))
    return [block for block in all_blocks if not languages or block.language in languages]


def commands() -> list[PageCommand]:
    return [command for block in blocks(*SHELLS) for command in block.commands()]


def code_in_sentences() -> list[PageCommand]:
    """Return the `code` within the sentences of all pages."""
    commands = []
    for page in PAGES:
        prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
        for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
            place = f"{page.relative_to(ROOT).as_posix()}:{prose.count(chr(10), 0, match.start()) + 1}"
            commands.append(PageCommand(place, " ".join(match[1].split())))
    return commands


@dataclass(frozen=True)
class Program:
    """A program of ours with its arguments: of click, of argparse, or a shell script that takes some words."""

    arguments: list[str]
    click_command: click.Command | None = None
    argparse_main: Callable[[], None] | None = None
    allowed_words: Callable[[str], bool] = lambda word: False

    def parse(self) -> dict[str, object]:
        """Return click's parameters by name; of other programs, nothing. Raises UnknownCommandError."""
        if self.click_command:
            try:
                return _leaf(self.click_command, self.arguments).params
            except click.ClickException as error:
                raise UnknownCommandError(error.format_message()) from error
        if self.argparse_main:
            _parse_argparse(self.argparse_main, self.arguments)
        elif wrong := [word for word in self.arguments if not self.allowed_words(word)]:
            raise UnknownCommandError(f"it does not take {' '.join(wrong)}")
        return {}

    def options(self) -> set[str]:
        """Return the options of a click command, of all its subcommands if the arguments name none; else nothing."""
        return _options(self.click_command, self.arguments) if self.click_command else set()

    def run(self, more: Words = ()) -> Result:
        """Run a click command in this process, with more arguments at the end."""
        assert self.click_command is not None
        return CliRunner().invoke(self.click_command, [*self.arguments, *more])


def find_program(words: Words) -> Program | None:
    """Return the program of ours that a command line starts, or None. Raises UnknownCommandError."""
    match list(words):
        case [("convert" | "uptrain") as name, *rest]:
            return Program(rest, import_module(f"{name}.cli").cli)
        case [("python" | "python3"), "-m", module, *rest] if module.partition(".")[0] in PACKAGES:
            return _find_module(module, rest)
        case ["accelerate", "launch", *rest] if "uptrain" in rest:
            return find_program(rest[rest.index("uptrain") :])
        case ["sbatch", "scripts/launch/slurm/uptrain.sbatch", run, *rest]:
            return find_program(["uptrain", "run", *rest, "--out", run])
        case [script, *rest] if script.startswith("scripts/"):
            return _find_script(script, rest)
    return None


def _find_module(module: str, arguments: list[str]) -> Program:
    if module in ("convert", "uptrain"):
        return Program(arguments, import_module(f"{module}.cli").cli)
    if find_spec(module) is None:
        raise UnknownCommandError(f"there is no module {module}")
    loaded = import_module(module)
    main = getattr(loaded, "command", loaded.main)
    return Program(arguments, main) if isinstance(main, click.Command) else Program(arguments, argparse_main=main)


def _find_script(script: str, arguments: list[str]) -> Program:
    path = ROOT / script
    if not (path.exists() and path.stat().st_mode & 0o111):
        raise UnknownCommandError("there is no such program")
    if script.startswith("scripts/uptrain_multi_"):
        return Program(arguments, import_module("uptrain.cli").cli)
    if script == "scripts/study/run":
        return _find_module("scripts.study.run", arguments)
    if script == "scripts/interop":
        return Program(arguments, allowed_words=lambda name: (ROOT / f"tests/interop/requirements/{name}.txt").exists())
    if script == "scripts/test":
        others = arguments[1:] if arguments[:1] == ["--all"] else arguments  # the script knows it only there
        return Program(others, allowed_words=lambda word: word in OPTIONS_OF_PYTEST or (ROOT / word).exists())
    return Program(arguments)


def _leaf(command: click.Command, arguments: Words, name: str = "") -> click.Context:
    """Return the context of the innermost command, after its options are parsed and checked."""
    if isinstance(command, click.Group):
        sub_name, sub_command, rest = command.resolve_command(click.Context(command), list(arguments))
        assert sub_command is not None
        return _leaf(sub_command, rest, sub_name or "")
    return command.make_context(name, list(arguments))


def _options(command: click.Command, arguments: Words = ()) -> set[str]:
    if not isinstance(command, click.Group):
        return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if not arguments:
        return set().union(*map(_options, command.commands.values()))
    if arguments[0] not in command.commands:
        raise UnknownCommandError(f"there is no command {arguments[0]}")
    return _options(command.commands[arguments[0]], arguments[1:])


def _parse_argparse(main: Callable[[], None], arguments: Words) -> None:
    class Parsed(Exception):
        """Stops main() after its arguments are parsed."""

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *_: object) -> None:
        parse(parser, list(arguments))
        raise Parsed

    def fail(parser: argparse.ArgumentParser, message: str) -> None:
        raise UnknownCommandError(message)

    with (
        patch.object(sys, "argv", ["program"]),
        patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        patch.object(argparse.ArgumentParser, "error", fail),
    ):
        try:
            main()
        except Parsed:
            return
    raise AssertionError("main() parsed nothing")
