"""`--track`: numbers go to a tracker too, or it is said that they cannot."""

import pytest
import real_runs


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
