"""A gradient that is no number changes nothing; three in a hundred end the run, with the last good state saved."""

import json
import math

import caches
import numpy as np
import pytest
import tiny
import torch
import training
from faulty_runs import error_of, succeed
from faulty_training import Fault, Faults, run
from training import assert_same_run, checkpoints, differing_tensors, records, status


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return training.make_inputs(tmp_path_factory.mktemp("inputs"))


def left_out(out):
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
def test_the_update_is_left_out(inputs, tmp_path, processes, factor):
    """In all processes, where it was one's loss; and what was logged is no average that hides it."""
    out = tmp_path / "run"
    arguments = training.arguments(inputs, out, "--save-every-steps", 1, "--keep-last", 99)
    succeed(arguments, tmp_path, processes, Faults(losses={5: factor}, losses_rank=processes - 1))
    assert not differing_tensors(saved_after(out, 5), saved_after(out, 6))
    assert differing_tensors(saved_after(out, 6), saved_after(out, 7))
    state = json.loads((saved_after(out, 12) / "state.json").read_text())
    assert (state["skipped"], state["not_finite"]) == ([6], [6])
    assert left_out(out) == [6]
    for record in records(out)[1:]:
        numbers = [record["loss"], record["grad_norm"]]
        assert numbers == [None, None] if record["step"] == 6 else all(isinstance(x, float) for x in numbers), record
    assert status(out) == ("finished", 12)


@pytest.mark.slow
def test_the_first_update(inputs, tmp_path):
    """Then there is no state of the optimizer to save yet."""
    out, other = tmp_path / "run", tmp_path / "other"
    faults = Faults([Fault("SIGTERM", "before _backward 0")], losses={0: math.nan})
    succeed(training.arguments(inputs, out), tmp_path, faults=faults)
    assert status(out) == ("preempted", 1)
    succeed(("resume", out), tmp_path)
    succeed(training.arguments(inputs, other), tmp_path, faults=Faults(losses={0: math.nan}))
    assert_same_run(out, other)


@pytest.mark.parametrize(
    ("processes", "sharded"), [(1, False), *(pytest.param(2, x, marks=pytest.mark.slow) for x in (False, True))]
)
def test_nothing_to_predict(inputs, tmp_path, processes, sharded):
    """Where every document is one token long, a step has no loss to divide, and changes no weight."""
    out = tmp_path / "run"
    data = caches.write_cache(tmp_path / "data", [[[i] for i in range(256)]], 32, training.VOCAB)
    options = ("--save-every-steps", 1, "--warmup-steps", 1)
    arguments = training.arguments({**inputs, "data": data}, out, *options, loss="mix", steps=2)
    succeed(arguments, tmp_path, processes, sharded=sharded)
    assert training.steps(out, "loss", "grad_norm", "tokens") == [(1, 0.0, 0.0, 256), (2, 0.0, 0.0, 512)]
    differing = differing_tensors(saved_after(out, 1), saved_after(out, 2))
    assert differing
    assert all(name.endswith(".step") for name in differing)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_third_ends_the_run(inputs, tmp_path, processes):
    out, good = tmp_path / "run", tmp_path / "good"
    arguments = training.arguments(inputs, out, "--save-every-steps", 100)
    faults = Faults(losses=dict.fromkeys((5, 8, 9), math.nan), losses_rank=processes - 1)
    results = run(*arguments, folder=tmp_path, processes=processes, faults=faults)
    assert error_of(results, 1) == (
        "3 of the last 100 gradients were not finite (steps 6, 9, 10); halted with the last good weights saved. "
        "A lower --lr or cleaner data may help."
    )
    assert status(out) == ("halted", 10)
    assert checkpoints(out) == ["step-00000010"]
    arguments = training.arguments(inputs, good, "--save-every-steps", 8)
    faults = Faults([Fault("kill", "before _backward 9")], losses={5: math.nan})
    run(*arguments, folder=tmp_path, processes=processes, faults=faults)
    assert not differing_tensors(saved_after(out, 10), saved_after(good, 8))
    succeed(("resume", out), tmp_path, processes)
    assert status(out) == ("finished", 12)


def test_weights_that_are_no_numbers(inputs, tmp_path):
    """A model that was broken before: its first evaluation is written as null, and it halts after three steps."""
    model, out = tiny.build(vocab_size=training.VOCAB, num_key_value_heads=2), tmp_path / "run"
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = math.nan
    inputs = {**inputs, "model": tiny.save(model, tmp_path / "broken")}
    arguments = training.arguments(inputs, out, "--eval-data", inputs["held_out"], "--eval-every", 7)
    error = error_of(run(*arguments, folder=tmp_path), 1)
    assert error.startswith("3 of the last 100 gradients were not finite (steps 1, 2, 3);")
    _, evaluation, *steps = records(out)
    assert evaluation["evaluation"]["loss"] is None
    assert [(r["loss"], r["grad_norm"]) for r in steps] == [(None, None)] * 3


@pytest.mark.parametrize(
    ("not_finite", "halts"), [([1, 2, 100], True), ([1, 50, 101], False), ([1, 2, 3], False), ([99, 100], False)]
)
def test_a_hundred_are_a_hundred(not_finite, halts):
    """Steps are counted from 1; only the step just made can end the run."""
    from uptrain.loop import Halted, Progress, _halt_if_hopeless

    class Saved:
        saved_step = max(100, *not_finite)

    progress = Progress(step=Saved.saved_step, skipped=[*range(1, 90)], not_finite=not_finite)
    if halts:
        with pytest.raises(Halted):
            _halt_if_hopeless(Saved, progress)
    else:
        _halt_if_hopeless(Saved, progress)


def test_spikes(inputs, tmp_path):
    """One before the rule has seen enough is taken, one later is left out; a stopped run decides the same."""
    straight, stopped, rule = tmp_path / "straight", tmp_path / "stopped", ("--spike-sigma", 20)
    faults = {"constants": {"SPIKE_WINDOW": 4}, "losses": {2: 1000.0, 8: 1000.0}}
    succeed(training.arguments(inputs, straight, *rule), tmp_path, faults=Faults(**faults))
    assert left_out(straight) == [9]
    strike = Fault("SIGTERM", "before _backward 7")
    succeed(training.arguments(inputs, stopped, *rule), tmp_path, faults=Faults([strike], **faults))
    succeed(("resume", stopped), tmp_path, faults=Faults(**faults))
    assert left_out(stopped) == [9]
    assert_same_run(stopped, straight)


@pytest.mark.parametrize("sigma", [3, 6, 20])
def test_a_rise_that_lasts_is_no_spike(sigma):
    """Else all further updates would be left out. A single spike does not hide the next."""
    from types import SimpleNamespace

    from uptrain.loop import SPIKE_WINDOW, Progress, _is_bad

    rng, progress, t = np.random.default_rng(0), Progress(), SimpleNamespace(spike_sigma=sigma)

    def skipped(norms):
        return [_is_bad(t, progress, float(norm)) for norm in norms]

    assert not any(skipped(1 + 0.01 * rng.standard_normal(SPIKE_WINDOW)))
    assert skipped([1e9, 1e9]) == [True, True]
    assert sum(skipped(2 + 0.01 * rng.standard_normal(2000))) < SPIKE_WINDOW
    assert skipped([1e9]) == [True]


def test_spikes_are_taken_without_the_rule_and_never_halt_with_it(inputs, tmp_path):
    taken, refused = tmp_path / "taken", tmp_path / "refused"
    faults = Faults(constants={"SPIKE_WINDOW": 4}, losses=dict.fromkeys((6, 7, 8, 9), 1000.0))
    succeed(training.arguments(inputs, taken), tmp_path, faults=faults)
    assert left_out(taken) == []
    succeed(training.arguments(inputs, refused, "--spike-sigma", 20), tmp_path, faults=faults)
    assert left_out(refused) == [7, 8, 9, 10]
