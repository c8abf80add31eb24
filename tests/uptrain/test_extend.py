"""A longer run: what it records of the run it comes from, and which runs have none. Its steps: `test_resume.py`."""

import json

import fake_runs
import pytest
import real_runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return real_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


def test_its_record(uptrain, inputs, tmp_path):
    short, longer = tmp_path / "short", tmp_path / "longer"
    more = ("--original-tokens", 256 * 100, "--eval-data", inputs["held_out"], "--eval-every", 2)
    more += ("--save-every-steps", 5)  # and where the decay begins, at 4
    assert uptrain(*real_runs.arguments(inputs, short, *more, steps=5)).code == 0
    assert uptrain("extend", short, "--out", longer, "--alpha", 0.08).code == 0
    before, after = (json.loads((run / "run.json").read_text()) for run in (short, longer))
    assert after["parent"] == {"run": str(short), "step": 4}
    assert after["settings"] == {**before["settings"], "steps": 8}
    assert (after["budget"]["steps"], after["budget"]["tokens"], after["budget"]["alpha"]) == (8, 8 * 256, 0.08)
    assert [step for step, _ in real_runs.evaluations(short)] == [0, 2, 4, 5]
    assert [step for step, _ in real_runs.evaluations(longer)] == [0, 2, 4, 6, 8]
    assert [step for (step,) in real_runs.steps(longer)] == [*range(1, 9)]
    kept = [
        json.loads((path / "state.json").read_text())["keep"] for path in sorted((longer / "checkpoints").iterdir())
    ]
    assert kept.count(True) == 1, "the one that was copied gave way to its own"


def test_alpha_stays_unknown(uptrain, inputs, tmp_path):
    short, longer = tmp_path / "short", tmp_path / "longer"
    assert uptrain(*real_runs.arguments(inputs, short, steps=5)).code == 0
    assert uptrain("extend", short, "--out", longer, "--steps", 6, "--max-minutes", 0).code == 0
    assert json.loads((longer / "run.json").read_text())["budget"]["alpha"] is None
    uptrain("extend", short, "--out", longer, "--steps", 6).refused("exists already")
    uptrain("extend", short, "--out", tmp_path / "other", "--alpha", 0.1).refused("give --tokens or --steps")


@pytest.mark.parametrize(
    ("settings", "steps", "words"),
    [
        ({}, 50, ["has 50 steps already; 50 would not extend it"]),
        ({"schedule": "cosine"}, 60, ["has a cosine schedule", "cannot be extended", "--schedule wsd"]),
        ({}, 60, ["no checkpoint from before its learning rate decays", "uptrain resume"]),
        ({"schedule": "constant"}, 60, ["to continue from is damaged", "step-00000045", "0.distcp has 3 bytes"]),
    ],
)
def test_refusals(uptrain, tmp_path, settings, steps, words):
    """With wsd the learning rate decays from step 40."""
    run = fake_runs.write_run(tmp_path / "run", **settings)
    (fake_runs.write_checkpoint(run, 45) / "tensors/0.distcp").write_bytes(b"cut")
    uptrain("extend", run, "--out", tmp_path / "longer", "--steps", steps).refused(*words)
    assert not (tmp_path / "longer").exists()
