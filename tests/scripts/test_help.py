"""What helps and messages name exists: choices in the help of an option, headings of pages."""

import re
from importlib import import_module

import click
import pytest
from pages import ROOT

PACKAGES = ("convert", "uptrain", "model", "scripts")
HEADING = re.compile(r'docs/([a-z/]+\.md)[,;]\s+(?:#\s+)?\\?"([^"\\]+)\\?"')
"""`docs/PAGE.md, "Heading"` in a message or a comment."""


def choices():
    for package in ("convert", "uptrain"):
        for name in import_module(f"{package}.commands").COMMANDS:
            command = import_module(f"{package}.commands.{name.replace('-', '_')}").command
            for option in command.params:
                if isinstance(option.type, click.Choice) and len(option.type.choices) > 2 and not option.hidden:
                    yield pytest.param(option, id=f"{package}-{name}{option.opts[0]}")


@pytest.mark.parametrize("option", list(choices()))
def test_the_help_explains_every_choice(option):
    """The default choice may go without saying."""
    explained = {choice for choice in option.type.choices if re.search(rf"(?<![\w-]){choice}(?![\w-])", option.help)}
    assert set(option.type.choices) - explained <= {option.default}


def quoted_headings():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from HEADING.findall(path.read_text())


def test_headings_that_the_code_quotes_are_in_their_pages():
    quoted = list(quoted_headings())
    assert len(quoted) >= 5
    for page, heading in quoted:
        assert re.search(rf"^#+ {re.escape(heading)}$", (ROOT / "docs" / page).read_text(), re.MULTILINE), heading
