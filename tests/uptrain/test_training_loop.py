"""The training loop in memory: a step waits for its device once, when a run is saved, and where gradients lie."""

import copy
import itertools
import threading

import pytest
import real_runs
import torch
import torch.distributed as dist
from small_training import make_training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from uptrain.checkpoints.tensors import SaveError
from uptrain.training import loop, spikes
from uptrain.training.loop import TrainingProgress, train
from uptrain.training.optimizer import can_skip_on_device, make_optimizer, step_unless

WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__float__", "__int__", "__bool__", "__index__")
"""Methods of a tensor that wait for its device."""
STEPS = 5


@pytest.fixture
def calls(monkeypatch):
    """Return a list that fills with the names of the waits of this thread."""
    calls, ours = [], threading.current_thread()

    def wrap(name):
        real = getattr(torch.Tensor, name)

        def called(*arguments, **options):
            if threading.current_thread() is ours:
                calls.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, called)

    for name in WAITS:
        wrap(name)
    return calls


def of_steps(calls):
    """Divide the calls at the records of the steps; leave out what comes after the last."""
    steps, step = [], []
    for call in calls:
        if isinstance(call, dict):
            steps.append(step)
            step = []
        else:
            step.append(call)
    return steps


@pytest.mark.parametrize("spike_sigma", [None, 6.0])
def test_a_step_fetches_once_after_its_update(tmp_path, calls, monkeypatch, spike_sigma):
    monkeypatch.setattr(spikes, "SPIKE_WINDOW", 2)
    assert (
        train(make_training(tmp_path, STEPS, calls.append, spike_sigma=spike_sigma), TrainingProgress()) == "finished"
    )
    assert of_steps(calls) == [["update", "tolist"]] * STEPS


def test_a_step_draws_the_same_random_numbers_everywhere(tmp_path):
    """Whatever Python's version: a run that is resumed continues with the dropout that it would have had."""
    seeds = []

    def report(event):
        if event == "update":
            seeds.append(torch.initial_seed())

    train(make_training(tmp_path, 3, report, seed=5), TrainingProgress())
    assert seeds == [12631478326263854183, 17996766564426832300, 4160164373342109173]


def test_other_optimizers_update_after_the_fetch(tmp_path, calls):
    """They cannot skip on the device. Adafactor waits for its own norms."""
    assert train(make_training(tmp_path, STEPS, calls.append, "adafactor"), TrainingProgress()) == "finished"
    assert [step[:2] for step in of_steps(calls)] == [["tolist", "update"]] * STEPS


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path):
    """Neither parameters nor the optimizer's states, which the next step continues."""
    progress, kept = TrainingProgress(), []

    def tensors():
        states = training.optimizer.state_dict()["state"][0]
        return copy.deepcopy({**training.loss_module.state_dict(), **states})

    def look(record):
        if isinstance(record, dict):
            kept.append(tensors())

    training = make_training(tmp_path, STEPS, look)
    training.loss_module.register_forward_hook(lambda *call: call[2] * (float("nan") if progress.step == 2 else 1))
    train(training, progress)
    assert progress.skipped == progress.not_finite == [3]
    same = [all(torch.equal(after[name], before[name]) for name in after) for before, after in itertools.pairwise(kept)]
    assert same == [False, True, False, False]


@pytest.mark.parametrize("sizes", [(3,), (3, 4)])
def test_a_skipped_update_is_none(sizes):
    model, other = (nn.ParameterList([torch.ones(sizes)]) for _ in range(2))
    optimizers = [make_optimizer("adamw", each, 0.1) for each in (model, other)]
    for group in (*optimizers[0].param_groups, *optimizers[1].param_groups):
        group["lr"] = 0.1
    assert all(map(can_skip_on_device, optimizers))
    for value, skip in ((1.0, False), (float("inf"), True), (2.0, False), (3.0, True), (4.0, False)):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            each[0].grad = torch.full(sizes, value)
            if each is model:
                step_unless(optimizer, torch.tensor(skip))
            elif not skip:
                optimizer.step()
    assert torch.equal(model[0], other[0])
    states, others = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert all(torch.equal(states[name], others[name]) for name in others)
    assert not can_skip_on_device(make_optimizer("adafactor", model, 0.0))


def test_a_run_is_saved_by_time_too(tmp_path, monkeypatch):
    """However many steps lie between checkpoints. The clock starts again with each."""
    saved, now = [], itertools.count(0.0, 500.0)  # read once in a step, and once more where it is saved
    monkeypatch.setattr(loop, "SAVE_SECONDS", 3600.0)
    training = make_training(tmp_path, 20, lambda record: None)
    training.checkpoints.save = lambda module, optimizer, state, keep: saved.append(state["step"])
    training.save_tried_at = 0.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(now))
    train(training, TrainingProgress())
    assert saved == [9, 17, 20]


def test_saves_by_time_do_not_push_out_the_others(uptrain, inputs, tmp_path, monkeypatch):
    """A run whose loss rises must go back to where it last was well."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    options = ("--save-every", 4, "--keep-last", 2, "--schedule", "constant")
    uptrain(*real_runs.arguments(inputs, tmp_path / "run", *options, steps=11)).succeeded()
    assert real_runs.checkpoints(tmp_path / "run") == [f"step-{step:08d}" for step in (4, 8, 10, 11)]


def test_spikes_in_a_row_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(spikes, "SPIKE_WINDOW", 4)
    records, progress = [], TrainingProgress()

    def report(event):
        if isinstance(event, dict):
            records.append(event)

    training = make_training(tmp_path, 30, report, spike_sigma=3.0)
    norms = itertools.chain([1.0, 1.1, 1.0, 1.1], (10.0**n for n in range(3, 12)), itertools.repeat(1.0))
    monkeypatch.setattr(loop, "_clip", lambda training: torch.tensor(next(norms), dtype=torch.float64))
    assert train(training, progress) == "finished"
    assert progress.skipped == list(range(5, 14))
    (event,) = (record for record in records if "event" in record)
    assert (event["step"], event["event"]) == (12, "updates left out")
    assert event["why"].startswith("the last 8 gradient norms were spikes")
    assert all(earlier["time"] <= later["time"] for earlier, later in itertools.pairwise(records))


def test_a_save_that_fails_is_not_tried_at_each_step(tmp_path, monkeypatch):
    """A full disk stays full for a while."""
    tried, now = [], itertools.count(0.0, 500.0)

    def fail(module, optimizer, state, keep):
        tried.append(state["step"])
        if state["step"] < 20:
            raise SaveError("No space left on device")

    training = make_training(tmp_path, 20, lambda record: None)
    training.checkpoints.save, training.save_tried_at = fail, 0.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(now))
    train(training, TrainingProgress())
    assert tried == [9, 17, 20]


def test_gradients_of_ddp_are_in_memory_once(tmp_path, monkeypatch):
    """All micro-batches accumulate into DDP's buckets, those of the first step too. Joining these changes no result."""
    (tmp_path / "plain").mkdir()
    plain = make_training(tmp_path / "plain", 4, lambda record: None)
    train(plain, TrainingProgress())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        training, places = make_training(tmp_path, 4, lambda record: None), []
        parameter = training.loss_module.table.weight
        training.loss_module = DistributedDataParallel(training.loss_module, gradient_as_bucket_view=True)
        monkeypatch.setattr(training.accelerator, "no_sync", lambda module: module.no_sync())
        parameter.register_post_accumulate_grad_hook(lambda p: places.append(p.grad.data_ptr()))
        train(training, TrainingProgress())
        assert parameter.grad.abs().max() == 0
    finally:
        dist.destroy_process_group()
    assert len(places) == 1 + 4 * 3
    assert len(set(places[1:])) == 1
    assert torch.equal(parameter, plain.loss_module.table.weight)


@pytest.mark.parametrize("sharded", [True, False])
def test_all_ranks_take_the_same_norm(tmp_path, monkeypatch, sharded):
    """Replicas of shards may have added in another order. A step that only one of them skips breaks the run."""
    training = make_training(tmp_path, STEPS, lambda _: None)
    monkeypatch.setattr(loop, "all_reduce_max", lambda accelerator, value: value + 1)
    if sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        norm = torch.tensor(2.0)
        norm = DTensor.from_local(norm, init_device_mesh("cpu", (1,)), [Replicate()]) if sharded else norm
        monkeypatch.setattr(training.accelerator, "clip_grad_norm_", lambda *_: norm)
        norm = loop._clip(training)
        assert (norm.item(), norm.dtype, type(norm)) == (3.0, torch.float64, torch.Tensor)
    finally:
        if sharded:
            dist.destroy_process_group()


@pytest.mark.parametrize("fails", ["killed", "first save", "both saves"])
def test_the_last_step_is_saved_before_the_last_evaluation(tmp_path, monkeypatch, fails):
    """A run that is killed in it has lost nothing. A save that fails is tried again afterwards."""
    saved, shown = [], []

    def save(module, optimizer, state, keep):
        saved.append(state["step"])
        if fails == "both saves" or (fails == "first save" and len(saved) == 1):
            raise SaveError("the disk is full")

    def evaluate(training, step):
        if step == STEPS:
            assert saved == [STEPS]
            if fails == "killed":
                raise KeyboardInterrupt

    training = make_training(tmp_path, STEPS, shown.append)
    training.eval_cache, training.checkpoints.save = training.cache, save
    monkeypatch.setattr(loop, "_evaluate_if_due", evaluate)
    if fails == "first save":
        assert train(training, TrainingProgress()) == "finished"
    else:
        with pytest.raises(KeyboardInterrupt if fails == "killed" else SaveError):
            train(training, TrainingProgress())
    assert saved == ([STEPS] if fails == "killed" else [STEPS, STEPS])
    assert [r["step"] for r in shown if isinstance(r, dict) and r.get("event") == "not saved"] == (
        [] if fails == "killed" else [STEPS]
    )
