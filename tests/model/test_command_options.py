"""The types of options."""

import click
import pytest

from model.common.command_options import SizeType


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5_000_000_000), ("500 mb", 500_000_000), ("2GiB", 2 << 30), ("1.5KB", 1500), ("123", 123), ("7B", 7),
     ("24G", 24_000_000_000)],
)  # fmt: skip
def test_sizes(text, size):
    assert SizeType().convert(text, None, None) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "0", "5 apples", "1e9", "9" * 21, "٣GB", "nan", "0.1B", "999999999T"]
)
def test_invalid_sizes(text):
    with pytest.raises(click.BadParameter, match="is not a size; write for example 24GB, 500MB or 2GiB"):
        SizeType().convert(text, None, None)
