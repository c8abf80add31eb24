"""A longer run: what it records of the run it comes from, and which runs have none. Its steps: `test_resume.py`."""

import json
import os
import shutil

import pytest
import real_runs
import tiny
import written_runs

from uptrain.budget.budget import BudgetOptions
from uptrain.data.token_cache import TokenCache
from uptrain.runs import extend


def test_its_record(uptrain, inputs, tmp_path):
    short, longer = tmp_path / "short", tmp_path / "longer"
    more = ("--original-tokens", 256 * 100, "--eval-data", inputs["held_out"], "--eval-every", 2)
    more += ("--save-every-steps", 5)  # and where the decay begins, at 4
    uptrain(*real_runs.arguments(inputs, short, *more, steps=5)).succeeded()
    uptrain("extend", short, "--out", longer, "--alpha", 0.08).succeeded()
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


def test_the_longer_run_begins_with_the_metrics_up_to_its_checkpoint(uptrain, inputs, tmp_path):
    short, longer = tmp_path / "short", tmp_path / "longer"
    uptrain(*real_runs.arguments(inputs, short, steps=5)).succeeded()
    extend.extend(short, longer, 8, BudgetOptions(steps=8))
    assert [step for (step,) in real_runs.steps(longer)] == [1, 2, 3, 4]  # the decay begins at 4


def test_data_that_are_read_too_often(uptrain, inputs, tmp_path):
    short, longer = tmp_path / "short", tmp_path / "longer"
    uptrain(*real_runs.arguments(inputs, short, steps=5)).succeeded()
    words = ("an extended run keeps its data, so extend it by less", "in place of --tokens.")
    uptrain("extend", short, "--out", longer, "--tokens", "10M").refused("the data would be read ", *words)
    assert not longer.exists()
    uptrain("extend", short, "--out", longer, "--steps", 40_000, "--max-minutes", 0).succeeded()


def test_alpha_stays_unknown(uptrain, inputs, tmp_path):
    short, longer = tmp_path / "short", tmp_path / "longer"
    uptrain(*real_runs.arguments(inputs, short, steps=5)).succeeded()
    uptrain("extend", short, "--out", longer, "--steps", 6, "--max-minutes", 0).succeeded()
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
    run = written_runs.write_run(tmp_path / "run", **settings)
    (written_runs.write_checkpoint(run, 45) / "tensors/0.distcp").write_bytes(b"cut")
    uptrain("extend", run, "--out", tmp_path / "longer", "--steps", steps).refused(*words)
    assert not (tmp_path / "longer").exists()


@pytest.mark.parametrize("function", ["find_damage", "read_manifest"])
def test_a_checkpoint_that_the_run_removes_meanwhile(uptrain, inputs, tmp_path, monkeypatch, function):
    run, real = tmp_path / "run", getattr(extend, function)
    uptrain(*real_runs.arguments(inputs, run, steps=5)).succeeded()
    monkeypatch.setattr(extend, function, lambda path: shutil.rmtree(path) or real(path))
    uptrain("extend", run, "--out", tmp_path / "longer", "--steps", 6).refused(
        ": the run removed this checkpoint meanwhile; run the command again."
    )
    assert not (tmp_path / "longer").exists()


@pytest.mark.parametrize(("name", "other", "words"), [
    ("data", "held_out", "holds other data than when the run began"),
    ("parent", "model", "is another teacher than when the run began"),
])  # fmt: skip
def test_other_inputs_than_those_of_the_run(uptrain, inputs, tmp_path, name, other, words):
    short, place = tmp_path / "short", shutil.copytree(inputs[name], tmp_path / name)
    uptrain(*real_runs.arguments({**inputs, name: place}, short, loss="distill", steps=5)).succeeded()
    shutil.rmtree(place)
    shutil.copytree(inputs[other], place)
    before = tiny.snapshot(short)
    uptrain("extend", short, "--out", tmp_path / "longer", "--steps", 6).refused(str(place), words)
    assert not (tmp_path / "longer").exists()
    assert tiny.snapshot(short) == before


def test_a_longer_run_inside_the_run(uptrain, tmp_path):
    run = written_runs.write_run(tmp_path / "run")
    uptrain("extend", run, "--out", run / "longer", "--steps", 60).refused(f"lies in {run}, ", "another --out")
    uptrain("extend", run, "--out", run, "--steps", 60).refused("exists already", "uptrain resume")


@pytest.mark.parametrize("place", [".", "checkpoints/.."])
def test_a_moved_run_that_is_the_present_folder(uptrain, inputs, tmp_path, monkeypatch, place):
    """The data of a run on texts move with it: they lie beside it, under its name."""
    cache, run = shutil.copytree(inputs["data"], tmp_path / "one.data"), tmp_path / "one"
    given = {**inputs, "data": cache}
    uptrain(*real_runs.arguments(given, run, "--max-minutes", 0)).succeeded()
    for path in (cache, run):
        path.rename(path.with_name(path.name.replace("one", "two")))
    monkeypatch.chdir(tmp_path / "two")
    resumed = uptrain("resume", place).succeeded()
    assert f"uptrain export {tmp_path}/two FOLDER" in resumed.out
    uptrain("extend", place, "--out", tmp_path / "longer", "--steps", 14, "--max-minutes", 0).succeeded()
    assert json.loads((tmp_path / "longer/run.json").read_text())["settings"]["data"] == str(tmp_path / "two.data")


def test_a_name_that_no_record_can_hold(uptrain, tmp_path):
    run = written_runs.write_run(tmp_path / os.fsdecode(b"bad\xff"), schedule="constant")
    written_runs.write_checkpoint(run, 45)
    uptrain("extend", run, "--out", tmp_path / "longer", "--steps", 60).refused("has a name that is not UTF-8")


def test_more_tokens_than_a_record_can_hold(uptrain, inputs, tmp_path):
    run = written_runs.write_run(tmp_path / "run", schedule="constant")
    written_runs.write_checkpoint(run, 45)
    uptrain("extend", run, "--out", tmp_path / "longer", "--steps", 10**18).refused("which is out of range")
    uptrain(*real_runs.arguments(inputs, tmp_path / "huge", steps=10**18)).refused("which is out of range")


def test_a_longer_run_that_repeats_its_data_says_so(uptrain, inputs, tmp_path):
    run, longer = tmp_path / "run", tmp_path / "longer"
    uptrain(*real_runs.arguments(inputs, run, steps=4)).succeeded()
    windows = TokenCache.open(inputs["data"]).n_windows
    per_step = json.loads((run / "run.json").read_text())["settings"]["global_batch"]
    ran = uptrain("extend", run, "--out", longer, "--steps", 2 * windows // per_step, "--max-minutes", 0).succeeded()
    assert "Warning: the data are read 1.89 times" in ran.err
