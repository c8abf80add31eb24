"""`--track`: numbers go to a tracker too, or it is said that they cannot."""

import accelerate.tracking
import pytest
import real_runs
from accelerate.utils import LoggerType


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return real_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_tracker_that_is_not_installed(uptrain, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("uptrain.distributed.accelerator.get_available_trackers", list)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run", "--track", "wandb"))
    result.refused("--track wandb needs a package: pip install wandb.")
    assert not (tmp_path / "run").exists()


def test_tensorboard(uptrain, inputs, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    more = ("--track", "tensorboard", "--eval-data", inputs["held_out"], "--eval-every", 6)
    assert uptrain(*real_runs.arguments(inputs, out, *more)).code == 0
    log = events.EventAccumulator(str(out / "tensorboard/run")).Reload()
    losses = {event.step: event.value for event in log.Scalars("loss")}
    assert losses == pytest.approx(dict(real_runs.steps(out, "loss")))
    assert [event.step for event in log.Scalars("held-out/loss")] == [0, 6, 12]


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
    result = uptrain(*real_runs.arguments(inputs, out, *more))
    assert result.code == 0
    (event,) = real_runs.events(out, "not tracked from here")
    assert (event["step"], event["why"]) == (3, "[Errno 28] No space left on device")
    assert "step 3: not tracked from here: [Errno 28] No space left on device" in result.err
    assert Failing.last.logged == [0, 1, 2]
    assert [step for (step,) in real_runs.steps(out)] == [*range(1, 13)]


def test_a_tracker_that_cannot_finish(uptrain, inputs, tmp_path, failing, monkeypatch):
    monkeypatch.setattr(Failing, "full_from", 99)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run", "--track", "tensorboard", steps=4))
    assert result.code == 0, result.err
    assert "Warning: tensorboard did not finish: [Errno 28] No space left on device" in result.err
