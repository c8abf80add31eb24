"""`--track`: numbers go to a tracker too, or it is said that they cannot."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import accelerate.tracking
import pytest
import real_runs
from accelerate.utils import LoggerType

from uptrain.training.trackers import finish_trackers, log_to_trackers, start_trackers


def test_a_tracker_that_is_not_installed(uptrain, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("uptrain.distributed.accelerator.get_available_trackers", list)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run", "--track", "wandb"))
    result.refused("--track wandb needs a package: pip install wandb.")
    assert not (tmp_path / "run").exists()


def test_tensorboard(uptrain, inputs, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    more = ("--track", "tensorboard", "--eval-data", inputs["held_out"], "--eval-every", 6)
    uptrain(*real_runs.arguments(inputs, out, *more)).succeeded()
    log = events.EventAccumulator(str(out / "tensorboard/run")).Reload()
    losses = {event.step: event.value for event in log.Scalars("loss")}
    assert losses == pytest.approx(dict(real_runs.steps(out, "loss")))
    assert [event.step for event in log.Scalars("held-out/loss")] == [0, 6, 12]


def test_tensorboard_shows_repeated_steps_once(uptrain, inputs, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    more = ("--track", "tensorboard", "--save-every", 4, "--keep-last", 3, "--schedule", "constant")
    more += ("--eval-data", inputs["held_out"], "--eval-every", 4)
    uptrain(*real_runs.arguments(inputs, out, *more)).succeeded()
    shutil.rmtree(out / "checkpoints/step-00000012")  # as a kill leaves it
    uptrain("resume", out).succeeded()
    assert real_runs.events(out, "resumed")[0]["step"] == 8
    log = events.EventAccumulator(str(out / "tensorboard/run")).Reload()
    assert [event.step for event in log.Scalars("loss")] == list(range(1, 13))
    assert [event.step for event in log.Scalars("held-out/loss")] == [0, 4, 8, 12]


class Failing:
    """A tracker whose disk is full from a step on."""

    full_from = 3
    name, main_process_only, requires_logging_directory = "tensorboard", True, True

    def __init__(self, *given, **options):
        self.logged = []
        Failing.last = self

    def start(self):
        pass

    def store_init_configuration(self, values):
        pass

    def log(self, values, step, **options):
        if step >= self.full_from:
            raise OSError(28, "No space left on device")
        self.logged.append(step)

    def finish(self):
        raise OSError(28, "No space left on device")


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Failing)


def test_a_tracker_that_fails_does_not_end_the_training(uptrain, inputs, tmp_path, failing):
    out = tmp_path / "run"
    more = ("--track", "tensorboard", "--eval-data", inputs["held_out"], "--eval-every", 6)
    result = uptrain(*real_runs.arguments(inputs, out, *more)).succeeded()
    (event,) = real_runs.events(out, "not tracked from here")
    assert (event["step"], event["why"]) == (3, "tensorboard: [Errno 28] No space left on device")
    assert "step 3: not tracked from here: tensorboard: [Errno 28] No space left on device" in result.err
    assert Failing.last.logged == [0, 1, 2]
    assert [step for (step,) in real_runs.steps(out)] == [*range(1, 13)]


def test_a_tracker_that_cannot_finish(uptrain, inputs, tmp_path, failing, monkeypatch):
    monkeypatch.setattr(Failing, "full_from", 99)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run", "--track", "tensorboard", steps=4)).succeeded()
    assert "the run did: tensorboard: [Errno 28] No space left on device" in result.err


def test_a_tracker_that_cannot_start(uptrain, inputs, tmp_path, failing, monkeypatch):
    def fails(self):
        raise RuntimeError("not logged in")

    monkeypatch.setattr(Failing, "start", fails)
    out = tmp_path / "run"
    uptrain(*real_runs.arguments(inputs, out, "--track", "tensorboard", steps=4)).succeeded()
    assert [(event["step"], event["why"]) for event in real_runs.events(out, "not tracked from here")] == [
        (0, "tensorboard: not logged in")
    ]


def test_a_tracker_starts_where_another_cannot():
    class Accelerator:
        log_with, trackers = ["wandb", "tensorboard"], []

        def init_trackers(self, name, config, init_kwargs):
            if self.log_with == ["wandb"]:
                raise RuntimeError("not logged in")
            self.trackers = [f"{self.log_with[0]} of {name}"]

    accelerator = Accelerator()
    assert start_trackers(accelerator, Path("runs/run"), "1", {}) == ["wandb: not logged in"]
    assert accelerator.trackers == ["tensorboard of run"]
    assert accelerator.log_with == ["wandb", "tensorboard"]


def test_a_resumed_run_stays_one_run_of_wandb(uptrain, inputs, tmp_path, failing, monkeypatch):
    """All runs are in one project, under the names of their folders."""
    started = []

    class Wandb(Failing):
        full_from, name, requires_logging_directory = 99, "wandb", False

        def __init__(self, project, **options):
            started.append((project, options))

        def log(self, values, step, **options):
            pass

        def finish(self):
            pass

    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.WANDB])
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run, other = tmp_path / "run", tmp_path / "other"
    wandb = ("--track", "wandb", "--max-minutes")
    uptrain(*real_runs.arguments(inputs, run, *wandb, 1e-9)).succeeded()
    uptrain("resume", run).succeeded()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    uptrain(*real_runs.arguments(inputs, other, *wandb, 1)).succeeded()
    assert [project for project, _ in started] == ["groupwise", "groupwise", "mine"]
    first, again, last = (options for _, options in started)
    assert first == again == {"name": "run", "id": first["id"], "resume": "allow", "dir": str(run)}
    assert (last["name"], last["id"] == first["id"]) == ("other", False)


def test_one_of_two_trackers_fails(monkeypatch):
    healthy, full = Failing(), Failing()
    monkeypatch.setattr(healthy, "full_from", 99, raising=False)
    monkeypatch.setattr(healthy, "finish", lambda: healthy.logged.append("finished"))
    accelerator = SimpleNamespace(trackers=[full, healthy], is_main_process=True)
    failures = [log_to_trackers(accelerator, {}, step) for step in (2, 3, 4)]
    assert failures == [[], ["tensorboard: [Errno 28] No space left on device"], []]
    assert finish_trackers(accelerator) == []
    assert (full.logged, healthy.logged) == ([2], [2, 3, 4, "finished"])
