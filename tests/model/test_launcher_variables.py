"""What the variables of a launcher say of a process."""

import sys

import click
import pytest

from model.common import console, launcher_variables
from model.common.errors import InputError, LostProcessError, RankError
from model.common.launcher_variables import MESSAGES

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("variables", "rank", "is_first", "has_launcher"), [
    ({}, 0, True, False),
    ({"LOCAL_RANK": "", "RANK": "0"}, 0, True, False),
    ({"LOCAL_RANK": "-1"}, 0, True, False),  # of a single process, by older launchers
    ({"LOCAL_RANK": "-1", "RANK": "3"}, 0, True, False),
    ({"RANK": "3"}, 0, False, False),
    (TORCHRUN, 1, False, True),
    ({**TORCHRUN, "LOCAL_RANK": "0"}, 0, True, True),
])  # fmt: skip
def test_the_number_of_a_process(monkeypatch, variables, rank, is_first, has_launcher):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (
        launcher_variables.local_rank(),
        launcher_variables.is_local_main_process(),
        launcher_variables.has_launcher(),
    ) == (
        rank,
        is_first,
        has_launcher,
    )


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (InputError("no room in na\udcefve."), {"1": "no room in na\\udcefve."}),
        (LostProcessError("another process cannot be reached."), {}),
        (RankError("process 1, no room."), {}),
    ],
)
def test_an_error_is_left_for_the_launcher(monkeypatch, tmp_path, error, left):
    """But one that this process has printed itself, and one that another process causes."""

    @click.command()
    def command():
        raise error

    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in {**variables, MESSAGES: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["uptrain"])
    with pytest.raises(SystemExit):
        console.run(command, launched=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == left
