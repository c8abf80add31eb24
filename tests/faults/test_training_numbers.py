"""A gradient that is no number changes nothing; three in a hundred end the run, with the last good state saved."""

import json
import math
from itertools import count
from types import SimpleNamespace

import caches
import numpy as np
import pytest
import real_runs
import tiny
import torch
from fault_injection import Fault, Faults, run
from faulty_runs import error_of, succeed
from real_runs import assert_same_run, checkpoints, differing_tensors, records, status, tensors

from model.checkpoint.safetensors_writer import ShardFile
from uptrain.data.order import windows_of_step


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return real_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


def skipped_steps(out):
    return [r["step"] for r in records(out) if r.get("skipped")]


def saved_after(out, step):
    return out / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize(
    ("processes", "factor"),
    [
        (2, math.nan),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, math.nan), (1, math.inf), (2, math.inf))),
    ],
)
def test_non_finite_update_is_skipped(inputs, tmp_path, processes, factor):
    """In all processes, where it was one's loss; and what was logged is no average that hides it."""
    out = tmp_path / "run"
    arguments = real_runs.arguments(inputs, out, "--save-every-steps", 1, "--keep-last", 99)
    succeed(arguments, tmp_path, processes, Faults(losses={5: factor}, losses_rank=processes - 1))
    assert not differing_tensors(saved_after(out, 5), saved_after(out, 6))
    assert differing_tensors(saved_after(out, 6), saved_after(out, 7))
    state = json.loads((saved_after(out, 12) / "state.json").read_text())
    assert (state["skipped"], state["not_finite"]) == ([6], [6])
    assert skipped_steps(out) == [6]
    for record in records(out)[1:]:
        numbers = [record["loss"], record["grad_norm"]]
        assert numbers == [None, None] if record["step"] == 6 else all(isinstance(x, float) for x in numbers), record
    assert status(out) == ("finished", 12)


@pytest.mark.slow
def test_the_first_update(inputs, tmp_path):
    """Then there is no state of the optimizer to save yet."""
    out, other = tmp_path / "run", tmp_path / "other"
    faults = Faults([Fault("SIGTERM", "before _backward 0")], losses={0: math.nan})
    succeed(real_runs.arguments(inputs, out), tmp_path, faults=faults)
    assert status(out) == ("preempted", 1)
    succeed(("resume", out), tmp_path)
    succeed(real_runs.arguments(inputs, other), tmp_path, faults=Faults(losses={0: math.nan}))
    assert_same_run(out, other)


@pytest.mark.parametrize(
    ("processes", "sharded"), [(1, False), *(pytest.param(2, x, marks=pytest.mark.slow) for x in (False, True))]
)
def test_nothing_to_predict(inputs, tmp_path, processes, sharded):
    """Where every document of a step is one token long, it has no loss to divide, and changes no weight.

    Only the last of 17 windows has something to predict, and the seed leaves it out.
    """
    out = tmp_path / "run"
    data = caches.write_cache(tmp_path / "data", [[*([i % 256] for i in range(512)), [1, 2]]], 32, real_runs.VOCAB)
    seed = next(n for n in count() if all(16 not in windows_of_step(step, 17, 8, n) for step in (0, 1)))
    options = ("--save-every-steps", 1, "--warmup-steps", 1, "--seed", seed)
    arguments = real_runs.arguments({**inputs, "data": data}, out, *options, loss="mix", steps=2)
    succeed(arguments, tmp_path, processes, sharded=sharded)
    assert real_runs.steps(out, "loss", "grad_norm", "tokens") == [(1, 0.0, 0.0, 256), (2, 0.0, 0.0, 512)]
    differing = differing_tensors(saved_after(out, 1), saved_after(out, 2))
    assert differing
    assert all(name.endswith(".step") for name in differing)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_third_ends_the_run(inputs, tmp_path, processes):
    out, good = tmp_path / "run", tmp_path / "good"
    arguments = real_runs.arguments(inputs, out, "--save-every-steps", 100)
    faults = Faults(losses=dict.fromkeys((5, 8, 9), math.nan), losses_rank=processes - 1)
    results = run(*arguments, folder=tmp_path, processes=processes, faults=faults)
    assert error_of(results, 1) == (
        "3 of the last 100 gradients were not finite (steps 6, 9, 10); halted with the last good weights saved. "
        "A lower --lr or cleaner data may help."
    )
    assert status(out) == ("halted", 10)
    assert checkpoints(out) == ["step-00000010"]
    arguments = real_runs.arguments(inputs, good, "--save-every-steps", 8)
    faults = Faults([Fault("kill", "before _backward 9")], losses={5: math.nan})
    run(*arguments, folder=tmp_path, processes=processes, faults=faults)
    assert not differing_tensors(saved_after(out, 10), saved_after(good, 8))
    succeed(("resume", out), tmp_path, processes)
    assert status(out) == ("finished", 12)


@pytest.mark.parametrize(("first", "good", "broken"), [(3, "2", "3, 4, 5"), (1, "", "1, 2, 3")])
def test_checkpoints_of_weights_that_are_probably_broken(inputs, tmp_path, uptrain, first, good, broken):
    """They were saved after the last update, before later gradients showed that it had broken the weights."""
    out, exported = tmp_path / "run", tmp_path / "exported"
    arguments = real_runs.arguments(inputs, out, "--save-every-steps", 1, "--keep-last", 9)
    faults = Faults(losses=dict.fromkeys(range(first, first + 3), math.nan))
    error = error_of(run(*arguments, folder=tmp_path, faults=faults), 1)
    before = (
        f"the checkpoint of step {good} is from before. Export it (--step {good})" if good else "there is no checkp"
    )
    assert f"are probably broken, and checkpoints hold them (step {broken}): {before}" in error
    halted = f"{out} was halted after step {first + 3}: 3 of the last 100 gradients were not finite"
    uptrain("export", out, exported).refused(halted, before)
    assert not exported.exists()
    step = good or broken[0]
    assert f"Warning: {halted}" in uptrain("export", out, exported, "--step", step).succeeded().err


@pytest.mark.parametrize("name", ["layers.0.self_attn.k_proj", "embed_tokens"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers(inputs, tmp_path, name, value):
    """A model that was broken before is refused at the start, also where its text does not use the broken weight."""
    model, out = tiny.build(vocab_size=real_runs.VOCAB, num_key_value_heads=2), tmp_path / "run"
    with torch.no_grad():
        model.model.get_submodule(name).weight[0, 0] = value
    inputs = {**inputs, "model": tiny.save(model, tmp_path / "broken")}
    error = error_of(run(*real_runs.arguments(inputs, out), folder=tmp_path), 2)
    assert error == f"weights of {inputs['model']} are NaN or infinite; the checkpoint is damaged."
    assert not out.exists()


def test_a_teacher_whose_weights_are_no_numbers(inputs, tmp_path):
    """It is named, and not the student."""
    teacher = tiny.build(vocab_size=real_runs.VOCAB)
    with torch.no_grad():
        teacher.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    inputs = {**inputs, "parent": tiny.save(teacher, tmp_path / "broken")}
    error = error_of(run(*real_runs.arguments(inputs, tmp_path / "run", loss="distill"), folder=tmp_path), 2)
    assert error == f"weights of {inputs['parent']} are NaN or infinite; the checkpoint is damaged."


@pytest.mark.parametrize(
    ("not_finite", "halts"), [([1, 2, 100], True), ([1, 50, 101], False), ([1, 2, 3], False), ([99, 100], False)]
)
def test_a_hundred_are_a_hundred(not_finite, halts):
    """Steps are counted from 1; only the step just made can end the run."""
    from uptrain.training.loop import RunHaltedError, TrainingProgress, _halt_on_non_finite

    step = max(100, *not_finite)
    training = SimpleNamespace(
        saved_step=step, loss_module=torch.nn.Linear(1, 1),
        accelerator=SimpleNamespace(num_processes=1, device=torch.device("cpu")),
    )  # fmt: skip
    progress = TrainingProgress(step=step, skipped=[*range(1, 90)], not_finite=not_finite)
    if halts:
        with pytest.raises(RunHaltedError):
            _halt_on_non_finite(training, progress)
    else:
        _halt_on_non_finite(training, progress)


def test_spikes(inputs, tmp_path):
    """An update before the window is full is applied, a later one is skipped; a stopped run decides the same."""
    straight, stopped, option = tmp_path / "straight", tmp_path / "stopped", ("--spike-sigma", 20)
    faults = {"constants": {"SPIKE_WINDOW": 4}, "losses": {2: 1000.0, 8: 1000.0}}
    succeed(real_runs.arguments(inputs, straight, *option), tmp_path, faults=Faults(**faults))
    assert skipped_steps(straight) == [9]
    strike = Fault("SIGTERM", "before _backward 7")
    succeed(real_runs.arguments(inputs, stopped, *option), tmp_path, faults=Faults([strike], **faults))
    succeed(("resume", stopped), tmp_path, faults=Faults(**faults))
    assert skipped_steps(stopped) == [9]
    assert_same_run(stopped, straight)


def test_spikes_are_taken_without_the_rule_and_never_halt_with_it(inputs, tmp_path):
    taken, refused = tmp_path / "taken", tmp_path / "refused"
    faults = Faults(constants={"SPIKE_WINDOW": 4}, losses=dict.fromkeys((6, 7, 8, 9), 1000.0))
    succeed(real_runs.arguments(inputs, taken), tmp_path, faults=faults)
    assert skipped_steps(taken) == []
    succeed(real_runs.arguments(inputs, refused, "--spike-sigma", 20), tmp_path, faults=faults)
    assert skipped_steps(refused) == [7, 8, 9, 10]


class TestAnUpdateThatBreaksTheWeights:
    """Its own gradient is finite, all later ones are not: what is saved must be from before."""

    def broken(self, inputs, folder, processes=1, sharded=False):
        out = folder / "run"
        options = ("--lr", 1e38, "--schedule", "constant", "--warmup-steps", 0, "--save-every-steps", 1)
        arguments = real_runs.arguments(inputs, out, *options, "--weight-decay", 1e30, "--keep-last", 1)
        return out, error_of(run(*arguments, folder=folder, processes=processes, sharded=sharded), 1)

    @pytest.mark.parametrize(
        ("processes", "sharded"), [(1, False), *(pytest.param(2, x, marks=pytest.mark.slow) for x in (False, True))]
    )
    def test_is_not_saved(self, inputs, tmp_path, uptrain, processes, sharded):
        out, error = self.broken(inputs, tmp_path, processes, sharded)
        assert "weights are NaN or infinite, and were not saved" in error
        assert status(out)[0] == "halted"
        assert checkpoints(out) == []  # the first step breaks the weights

    def test_resuming_leaves_the_good_ones(self, inputs, tmp_path):
        """Each resumed run breaks again, as it is the same run."""
        out = tmp_path / "run"
        succeed(real_runs.arguments(inputs, out, "--keep-last", 1), tmp_path, faults=stop_before(5))
        assert "step-00000006" in checkpoints(out)
        settings = json.loads((out / "run.json").read_text())
        settings["settings"] |= {"lr": 1e38, "weight_decay": 1e30, "schedule": "constant", "warmup_steps": 0}
        settings["budget"]["peak_lr"] = 1e38
        (out / "run.json").write_text(json.dumps(settings))
        for _ in range(3):
            error = error_of(run("resume", out, folder=tmp_path), 1)
            assert "the checkpoint of step 6 is from before. Export it (--step 6)" in error
            good = tensors(out / "checkpoints/step-00000006")  # of an update later, weights are finite, and useless
            assert max(t.abs().max() for n, t in good.items() if "model." in n) < 10

    def test_a_checkpoint_of_an_earlier_version(self, inputs, tmp_path, uptrain, monkeypatch):
        """Neither trained on nor exported. The half-written shard is not flushed, which could fail in its turn."""
        out = tmp_path / "run"
        succeed(real_runs.arguments(inputs, out), tmp_path, faults=stop_before(5))
        spoil(out / "checkpoints/step-00000006", math.nan)
        error = error_of(run("resume", out, folder=tmp_path), 2)
        assert error.endswith("step-00000006 holds weights that are NaN or infinite; remove it to use an older one.")
        monkeypatch.setattr(ShardFile, "finish", None)
        uptrain("export", out, tmp_path / "out").refused("NaN or infinite in float32; choose an earlier checkpoint")
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / ".out.groupwise").exists()


def test_halting_again_removes_no_checkpoint(inputs, tmp_path):
    """With three bad gradients in a hundred behind it, each resumed run may halt at its first: that is no rotation."""
    out = tmp_path / "run"
    arguments = real_runs.arguments(inputs, out, "--save-every-steps", 2, "--keep-last", 1)
    bad = dict.fromkeys((1, 3, 6, 7), math.nan)
    assert "halted with the last good weights saved" in error_of(
        run(*arguments, folder=tmp_path, faults=Faults(losses=bad)), 1
    )
    listings = [checkpoints(out)]
    error_of(run("resume", out, folder=tmp_path, faults=Faults(losses=bad)), 1)
    listings.append(checkpoints(out))
    first = ["step-00000004", "step-00000006", "step-00000007"]
    assert listings == [first, [*first, "step-00000008"]]
    succeed(("resume", out), tmp_path)
    assert checkpoints(out) == ["step-00000010", "step-00000012"]  # the last before the learning rate falls, the last


def stop_before(step):
    return Faults([Fault("SIGTERM", f"before _backward {step}")])


def spoil(checkpoint, value):
    """Write a number into a weight, as if the run had saved it so."""
    from model.checkpoint.formats.dcp.reader import DistributedFolder
    from uptrain.checkpoints.files import checksum

    with DistributedFolder(checkpoint / "tensors", ("model.student.",), checkpoint.parents[1] / "model") as weights:
        span = weights.span("model.norm.weight")
    with span.path.open("r+b") as file:
        file.seek(span.offset)
        file.write(np.float32(value).tobytes())
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = checksum(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
