"""What the variables of a launcher say of a process."""

import pytest

from model.common import launcher_variables

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
