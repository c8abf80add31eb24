"""Errors of a checkpoint name its folder, once."""

from pathlib import Path

import pytest

from model.common.errors import CheckpointError, prefix_path


@pytest.mark.parametrize(
    ("message", "contains"),
    [
        ("{}/config.json is damaged", True), ("{}: no", True), ("there is no weight in {}.", True),
        ("'{}' is none", True),
        ("a value is infinite", False), ("{}.layers.0.mlp lacks a row", False), ("other/{} is none", False),
        ("{}-2 is another", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("folder", ["inf", "model", "/models/my model"])
def test_the_path_is_put_before_a_message_without_it(folder, message, contains):
    text = message.format(folder)
    with pytest.raises(CheckpointError) as error, prefix_path(Path(folder)):
        raise CheckpointError(text)
    assert str(error.value) == (text if contains else f"{folder}: {text}")
