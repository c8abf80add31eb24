"""What a run prints where no bar can be drawn, as in a log."""

import pytest

from model.common import console
from uptrain.runs import progress


def step(n):
    return {"step": n, "loss": 4.0, "tokens_per_s": 100.0, "learning_rate": 1e-3}


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return a function that shows a record at a time, in seconds, and returns what is printed then."""
    seconds = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    with progress.training_bar(9) as show:

        def at(time, record):
            seconds[0] = 1000.0 + time
            show(record)
            return capsys.readouterr().err

        yield at


def test_a_line_every_half_minute(printed):
    """Also for the last step, every evaluation and every event."""
    times = [0, 10, 29.9, 30, 31, 59, 75, 76]
    shown = [time for time in times if printed(time, step(times.index(time) + 1))]
    assert shown == [0, 30, 75]
    assert printed(77, {"step": 8, "evaluation": {"loss": 3.5, "targets": 9}}) == "step 8: held-out loss 3.5000\n"
    assert "too full" in printed(77, {"step": 8, "event": "not saved", "why": "the disk is too full"})
    assert "step 9" in printed(78, step(9))


@pytest.mark.parametrize(("rank", "shows"), [("0", True), ("1", False)])
def test_one_process_draws_the_bar(monkeypatch, rank, shows):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    drawn = []

    class Recorded(console.Progress):
        def __init__(self, *columns, **options):
            drawn.append(columns)
            super().__init__(*columns, **options)

    monkeypatch.setattr(console, "Progress", Recorded)
    with console.progress_bar("Evaluating", 3, quiet=False, unit="windows") as advance:
        advance(1)
    assert bool(drawn) == shows
