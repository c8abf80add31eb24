"""The optimizers of `--optimizer`: their states are saved and resumed exactly, and take the memory that is planned."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from real_runs import (
    LAYOUTS,
    arguments,
    assert_layouts_train_alike,
    assert_stops_change_nothing,
    drive,
    make_inputs,
    steps,
)
from small_training import make_training
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from uptrain.estimates.memory import state_bytes
from uptrain.runs.settings import OPTIMIZERS
from uptrain.training.adafactor import Adafactor
from uptrain.training.learning_rate import Schedule
from uptrain.training.loop import TrainingProgress, train
from uptrain.training.optimizer import make_optimizer

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
ONES = [pytest.param(name, marks=needs_torchao if name == "adamw8bit" else ()) for name in OPTIMIZERS]
CELLS = [
    pytest.param(
        name, layout, marks=[*([needs_torchao] if name == "adamw8bit" else []),
                             *([pytest.mark.slow] if layout != "one process" else [])]
    )
    for name in ("adafactor", "adamw8bit") for layout in LAYOUTS
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Matrices large enough that their states have 8 bits, also when they are sharded."""
    return make_inputs(tmp_path_factory.mktemp("inputs"), hidden_size=128, intermediate_size=256)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_stopped_and_resumed_is_bit_equal(inputs, tmp_path, name, layout):
    more = ("--optimizer", name, "--trainable", "attention")
    assert_stops_change_nothing(inputs, tmp_path, LAYOUTS[layout], *more, loss="next-token", evaluates=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ONES)
def test_states_take_what_is_planned(name):
    model = nn.ModuleDict({"a": nn.Linear(128, 256, bias=False), "b": nn.Linear(16, 8)})
    optimizer = make_optimizer(name, model, 0.0)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    planned = sum(state_bytes(name, tuple(parameter.shape)) for parameter in model.parameters())
    used = sum(bytes_of(value) for state in optimizer.state.values() for value in state.values())
    assert planned <= used <= planned + 4096, "beside a number of steps and a table of 256 values each"


def bytes_of(value):
    if not isinstance(value, torch.Tensor):
        return 0
    names = getattr(value, "tensor_attrs", None)
    return value.nbytes if names is None else sum(getattr(value, name).nbytes for name in names)


@needs_torchao
@pytest.mark.timeout(600)
def test_eight_bits_learn_like_thirty_two(inputs, tmp_path):
    losses = []
    for name in ("adamw", "adamw8bit"):
        drive([{"arguments": arguments(inputs, tmp_path / name, "--optimizer", name, loss="distill")}])
        losses.append([loss for _, loss in steps(tmp_path / name, "loss")])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]
    assert losses[1][-1] < 0.95 * losses[1][0]


@pytest.fixture
def mesh():
    """Return a mesh of this process alone, in which DTensor decides as with many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_torch_fails_on_shards(mesh):
    """What our Adafactor is for. If this fails, torch's own does it all."""
    parameter = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"pow_.*in-place operations that require placement changes"):
        torch.optim.Adafactor([parameter]).step()


@pytest.mark.parametrize("sizes", [(7,), (7, 5), (3, 7, 5)])
def test_adafactor_updates_shards_like_whole_parameters(mesh, sizes):
    torch.manual_seed(0)
    start = torch.randn(sizes)
    whole, shards = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    pairs = [(each, Adafactor([each], lr=0.3, weight_decay=0.1)) for each in (whole, shards)]
    for _ in range(4):
        gradient = torch.randn(sizes)
        whole.grad, shards.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
        for _, optimizer in pairs:
            optimizer.step()
    assert (whole - start).norm() > 0.1
    torch.testing.assert_close(shards.full_tensor(), whole, rtol=1e-6, atol=1e-6)
    states, expected = (optimizer.state_dict()["state"][0] for _, optimizer in reversed(pairs))
    assert states.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(getattr(states[name], "full_tensor", lambda n=name: states[n])(), value)


@pytest.mark.parametrize("scale", [1e-2, 1e-6])
def test_adafactor_takes_the_steps_of_its_paper(scale):
    """Shazeer and Stern 2018, algorithm 4, in float64, for gradients as small as those of large models too.

    The rows' gradients differ by a factor of up to 100, which the states are there to level.
    """
    torch.manual_seed(0)
    model = nn.Linear(24, 16, bias=False)
    expected = model.weight.detach().double()
    optimizer = make_optimizer("adafactor", model, 0.0)
    rows, columns = torch.zeros(16, 1, dtype=torch.float64), torch.zeros(1, 24, dtype=torch.float64)
    for step in range(1, 5):
        gradient = scale * torch.logspace(0, 2, 16)[:, None] * torch.randn(16, 24)
        model.weight.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        squares, decay = gradient.double().square(), 1 - step**-0.8
        rows = decay * rows + (1 - decay) * squares.mean(1, keepdim=True)
        columns = decay * columns + (1 - decay) * squares.mean(0, keepdim=True)
        update = gradient.double() / (rows * columns / rows.mean()).sqrt()
        update /= max(1.0, float(update.square().mean().sqrt()))
        relative = min(0.1, step**-0.5) * max(1e-3, float(expected.square().mean().sqrt()))
        expected = expected - relative * update
    torch.testing.assert_close(model.weight.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adafactor_trains_shards_as_one_process_does(inputs, tmp_path):
    assert_layouts_train_alike(inputs, tmp_path, "--optimizer", "adafactor", n_steps=6)


def test_without_its_library_it_is_refused(inputs, tmp_path, uptrain, monkeypatch):
    monkeypatch.setattr("uptrain.training.optimizer.find_spec", lambda name: None)
    uptrain(*arguments(inputs, tmp_path / "run", "--optimizer", "adamw8bit")).refused(
        "--optimizer adamw8bit needs torchao: pip install torchao; or choose adamw"
    )
    assert not (tmp_path / "run").exists()


def test_resuming_without_its_library_is_refused(inputs, tmp_path, uptrain, monkeypatch):
    out = tmp_path / "run"
    uptrain(*arguments(inputs, out, steps=4)).succeeded()
    text = (out / "run.json").read_text()
    (out / "run.json").write_text(text.replace('"adamw"', '"adamw8bit"'))
    monkeypatch.setattr("uptrain.training.optimizer.find_spec", lambda name: None)
    uptrain("resume", out).refused("--optimizer adamw8bit needs torchao")


def test_compiling_without_a_compiler_is_refused_at_the_start(uptrain, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    uptrain(*arguments(inputs, tmp_path / "run", "--compile")).refused("--compile needs a C++ compiler")
    assert not (tmp_path / "run").exists()


def test_the_learning_rate_of_adafactor_is_the_one_applied(tmp_path):
    rates = []
    training = make_training(tmp_path, 5, lambda record: None, "adafactor")
    training.show = lambda record: rates.append(record["learning_rate"])
    training.schedule = Schedule("constant", 0.5, 5, 0)
    train(training, TrainingProgress())
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.5, 5**-0.5])
