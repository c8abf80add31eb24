"""What a run prints where no bar can be drawn, as in a log; and the bars."""

import math
from contextlib import nullcontext

import pytest
import real_runs

from model.common import console
from uptrain.data.token_cache import TokenCache
from uptrain.runs import launch, progress


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


def test_losses_that_are_not_finite_or_round_to_zero(printed):
    """The metrics hold null; the record that is shown holds the number."""
    assert printed(0, step(1) | {"loss": math.nan}).startswith("step 1: loss not finite · 100 tokens/s")
    assert printed(30, step(2) | {"loss": -1e-9}).startswith("step 2: loss 0.0000 · 100 tokens/s")
    evaluation = {"loss": math.inf, "kl": -1e-9, "kl_error": math.nan, "agreement": 1.0}
    shown = "step 2: held-out loss not finite, KL from the teacher 0.0000, agreement 100.0%\n"
    assert printed(30, {"step": 2, "evaluation": evaluation}) == shown
    evaluation |= {"loss": 3.5, "kl": 0.25, "kl_error": 0.0125}
    shown = "step 2: held-out loss 3.5000, KL from the teacher 0.2500 ± 0.0125, agreement 100.0%\n"
    assert printed(30, {"step": 2, "evaluation": evaluation}) == shown


def test_evaluations_print_no_line(printed):
    assert not printed(0, {"step": 0, "evaluated": 1, "of": 9})
    assert not printed(99, {"step": 0, "evaluated": 9, "of": 9})


def test_a_long_evaluation_has_a_bar(monkeypatch):
    """Below that of the training, and as long as it lasts. A stopped one leaves none."""
    made, seconds = [], [1000.0]

    class Recorded(progress.Progress):
        def __init__(self, *columns, **options):
            super().__init__(*columns, **options, auto_refresh=False)
            made.append(self)

    monkeypatch.setattr(progress, "Progress", Recorded)
    monkeypatch.setattr(progress, "draws_bars", lambda: True)
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    with progress.training_bar(9) as show:

        def bars(time, record):
            seconds[0] = 1000.0 + time
            show(record)
            return [(task.fields["what"], task.completed, task.total) for task in made[0].tasks if task.visible]

        training = ("Training", 4, 9)
        assert bars(0, step(4)) == [training]
        assert bars(1, {"step": 4, "evaluated": 2, "of": 8}) == [training]
        assert bars(3.5, {"step": 4, "evaluated": 5, "of": 8}) == [training]
        assert bars(4, {"step": 4, "evaluated": 6, "of": 8}) == [training, ("Evaluating", 6, 8)]
        assert bars(5, {"step": 4, "evaluation": {"loss": 3.5, "targets": 9}}) == [training]
        assert bars(6, {"step": 8, "evaluated": 1, "of": 8}) == [training]
        assert bars(9, {"step": 8, "evaluated": 8, "of": 8}) == [training, ("Evaluating", 8, 8)]
    assert [task.fields["what"] for task in made[0].tasks] == ["Training"]


def test_a_run_shows_its_evaluations(uptrain, tmp_path, monkeypatch):
    """Every held-out window once."""
    inputs, shown = real_runs.make_inputs(tmp_path), []
    monkeypatch.setattr(launch, "training_bar", lambda steps: nullcontext(shown.append))
    more = ("--eval-data", inputs["held_out"], "--eval-every", 4)
    uptrain(*real_runs.arguments(inputs, tmp_path / "run", *more, steps=4)).succeeded()
    n_windows = TokenCache.open(inputs["held_out"]).n_windows
    for at in (0, 4):
        done = [(each["evaluated"], each["of"]) for each in shown if "evaluated" in each and each["step"] == at]
        assert done == [(min(n, n_windows), n_windows) for n in range(3, n_windows + 3, 3)]
    assert all("evaluated" not in record for record in real_runs.records(tmp_path / "run"))


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
