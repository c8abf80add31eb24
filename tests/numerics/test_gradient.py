"""The gradient of a step is that of one big batch, however it is divided; and small learning rates move the weights."""

from pathlib import Path

import caches
import numpy as np
import pytest
import tiny
import torch
from real_runs import VOCAB, arguments, drive, make_inputs, tensors
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import load_model
from uptrain.data.batch import Batch
from uptrain.data.order import windows_of_step
from uptrain.data.token_cache import TokenCache


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Windows with 31 targets, and windows with a single one: 30 documents of a token and one of two."""
    folder = tmp_path_factory.mktemp("inputs")
    paths = make_inputs(folder)
    rng = np.random.default_rng(1)
    lengths = [n for _ in range(20) for n in (32, *[1] * 30, 2)]
    documents = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    paths["data"] = caches.write_cache(folder / "uneven", [documents], 32, VOCAB)
    return paths


def gradients_by_hand(inputs: dict[str, Path]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradient of the first step's windows as one batch, and the mean of the windows' mean gradients."""
    cache = TokenCache.open(inputs["data"])
    batch = Batch.read(cache, windows_of_step(0, cache.n_windows, 8, 0), "cpu")
    model = load_model(inputs["model"], torch.float64).train()

    def gradient(rows: slice) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            loss, n = model(batch.ids_BT[rows], batch.labels_BT[rows], batch.documents_BT[rows])
        (loss / n).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    by_row = [gradient(slice(row, row + 1)) for row in range(8)]
    return gradient(slice(8)), {name: torch.stack([g[name] for g in by_row]).mean(0) for name in by_row[0]}


def distance(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return ‖actual − wanted‖ / ‖wanted‖ over all tensors together."""
    pairs = [(actual[name].double(), wanted[name]) for name in wanted]
    square = sum((a - b).square().sum() for a, b in pairs)
    return float((square / sum(b.square().sum() for _, b in pairs)) ** 0.5)


@pytest.mark.parametrize(
    ("n_processes", "sharded"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_gradient_is_that_of_one_big_batch(inputs, tmp_path, n_processes, sharded):
    """Accumulated over 1, 2 and 4 micro-batches."""
    wanted, mean_of_means = gradients_by_hand(inputs)
    files, jobs = [], []
    for accumulation in (1, 2, 4):
        files.append(tmp_path / f"{accumulation}.pt")
        micro_batch = 8 // n_processes // accumulation
        run = arguments(
            inputs, tmp_path / f"run{accumulation}", "--micro-batch", micro_batch, "--precision", "fp32", steps=1
        )
        jobs.append({"arguments": [*run, "--warmup-steps", "0"], "gradient": str(files[-1])})
    drive(jobs, n_processes, sharded)
    for file in files:
        assert distance(torch.load(file), wanted) <= 1e-6
    assert distance(mean_of_means, wanted) > 0.1  # what averaging averages would give


def test_small_learning_rates_move_float32_masters(tmp_path):
    """50 steps of bf16 computation at 3e-6. Weights that are bf16 themselves would hardly move."""
    inputs = make_inputs(tmp_path)
    more = ("--lr", "3e-6", "--schedule", "constant", "--warmup-steps", "0", "--precision", "bf16")
    drive([{"arguments": arguments(inputs, tmp_path / "run", *more, steps=50)}])
    before = tiny.tensors(inputs["model"])
    after = tensors(tmp_path / "run/checkpoints/step-00000050")
    after = {name.removeprefix("model.student."): value for name, value in after.items() if name.startswith("model.")}
    assert share_moved(before, after) >= 0.99
    assert share_moved(before, train_bf16(inputs, steps=50)) < 0.3


def train_bf16(inputs: dict[str, Path], steps: int) -> dict[str, torch.Tensor]:
    """Train bf16 weights, the usual mistake."""
    cache, model = TokenCache.open(inputs["data"]), load_model(inputs["model"], torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        batch = Batch.read(cache, windows_of_step(step, cache.n_windows, 8, 0), "cpu")
        loss, n = model(batch.ids_BT, batch.labels_BT, batch.documents_BT)
        (loss / n).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def share_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    assert before.keys() == after.keys()
    moved = sum(int((before[name].to(after[name].dtype) != after[name]).sum()) for name in before)
    return moved / sum(value.numel() for value in before.values())
