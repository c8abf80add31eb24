"""The types of options."""

import click
import pytest
from click.testing import CliRunner

from model.common.checks import MAX_COUNT
from model.common.command_options import CountType, SizeType, WholeNumber


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5_000_000_000), ("500 mb", 500_000_000), ("2GiB", 2 << 30), ("1.5KB", 1500), ("123", 123), ("7B", 7),
     ("24G", 24_000_000_000), ("2.01GB", 2_010_000_000), ("9007199254740993", 9007199254740993)],
)  # fmt: skip
def test_sizes(text, size):
    assert SizeType().convert(text, None, None) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "0", "5 apples", "1e9", "9" * 21, "٣GB", "nan", "0.1B", "999999999T"]
)
def test_invalid_sizes(text):
    with pytest.raises(click.BadParameter, match="is not a size; write for example 24GB, 500MB or 2GiB"):
        SizeType().convert(text, None, None)


@pytest.mark.parametrize("text", ["1", "24", "9.9KB"])
def test_sizes_whose_unit_was_forgotten(text):
    with pytest.raises(click.BadParameter, match=f"'{text}' is less than 10,000 bytes; give a unit, for example 24GB"):
        SizeType(least=10**4).convert(text, None, None)


@pytest.mark.parametrize(("given", "count"), [("4096", 4096), ("4k", 4000), ("1.5M", 1_500_000), (7, 7), ("0", 0)])
def test_counts(given, count):
    assert CountType(0, 10**7).convert(given, None, None) == count


@pytest.mark.parametrize(("given", "words"), [("4 k", "not a count"), (-7, "not a count"), ("8", "more than 7")])
def test_invalid_counts(given, words):
    with pytest.raises(click.BadParameter, match=f"is {words}; give a whole number such as 4096, or 4K"):
        CountType(0, 7).convert(given, None, None)


def test_whole_numbers():
    """The help and the messages show no number of 19 digits, and the word that people use."""
    command = click.Command("x", params=[click.Option(["--seed"], type=WholeNumber(0, MAX_COUNT), metavar="N")])
    shown, wrong, large = (
        CliRunner().invoke(command, line.split()).output for line in ("--help", "--seed 4k", f"--seed {2**61}")
    )
    assert "--seed N" in shown and "[0<=x<=2^60]" in shown
    assert "'4k' is not a valid whole number." in wrong
    assert "is not in the range 0<=x<=2^60." in large
