"""Runs to compare: a tiny model, data, processes, and what a run has written."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import caches
import drive_training
import forks
import numpy as np
import pytest
import tiny
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from uptrain.distributed.accelerator import uses_gpu

HERE = Path(__file__).parent
LAYOUTS = {"one process": (1, False), "DDP x 2": (2, False), "FSDP2 x 2": (2, True)}
"""Number of processes, and whether they shard: the last arguments of `drive`."""
LAYOUT_CASES = [pytest.param(layout, marks=() if layout == "one process" else pytest.mark.slow) for layout in LAYOUTS]
"""Values of a test's parameter; the layouts of several processes are slow."""
VOCAB = 257
"""A prime: shards of FSDP are of unequal size."""


def make_inputs(folder: Path, dtype: str = "float32", **changes: int) -> dict[str, Path]:
    """Write a GQA model, its MHA parent, and two caches of windows of 32 tokens in documents of uneven length.

    `changes` are values of both models' config.json.
    """
    rng = np.random.default_rng(0)

    def documents(n: int) -> list[list[int]]:
        return [rng.integers(0, VOCAB, rng.integers(1, 60)).tolist() for _ in range(n)]

    return {
        "model": tiny.save(tiny.build(vocab_size=VOCAB, num_key_value_heads=2, **changes), folder / "model", dtype),
        "parent": tiny.save(tiny.build(vocab_size=VOCAB, **changes), folder / "parent", dtype),
        "data": caches.write_cache(folder / "data", [documents(30), documents(12)], 32, VOCAB),
        "held_out": caches.write_cache(folder / "held-out", [documents(9)], 32, VOCAB),
    }


def arguments(
    inputs: dict[str, Path], out: Path, *more: object, loss: str = "next-token", steps: int = 12
) -> list[str]:
    """Return the arguments of a run: 8 windows a step, so that an epoch is about five steps."""
    fixed = ["run", inputs["model"], "--data", inputs["data"], "--out", out, "--steps", steps, "--lr", 1e-3]
    fixed += ["--global-batch-tokens", 256, "--micro-batch", 3, "--warmup-steps", 3]
    teacher = ["--teacher", inputs["parent"], "--loss", loss] if loss != "next-token" else []
    return [str(x) for x in (*fixed, *teacher, *more)]


def environment(sharded: bool = False, on_cpu: bool = False) -> dict[str, str]:
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    settings |= {"ACCELERATE_USE_CPU": "true"} if on_cpu or not uses_gpu() else {}
    settings |= {"ACCELERATE_USE_FSDP": "true"} if sharded else {}
    # The shell that starts the tests need not have activated the environment whose programs the launch scripts call.
    settings |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}", **settings}


def command(script: list[str], n_processes: int, sharded: bool = False) -> list[str]:
    """Return how to start a Python script with its arguments in some processes. One alone can shard over itself."""
    if n_processes == 1 and not sharded:
        return [sys.executable, *script]
    options = [f"--nproc-per-node={n_processes}", f"--master-port={forks.free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *script]


def drive(
    jobs: list[dict[str, Any]],
    n_processes: int = 1,
    sharded: bool = False,
    on_cpu: bool = False,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run commands one after the other in the same processes; see `drive_training.py`. On CPUs these are forks.

    `settings`: more variables of a launcher.
    """
    if on_cpu or not uses_gpu():
        with TemporaryDirectory() as folder:
            outputs = [Path(folder) / f"output-{rank}" for rank in range(n_processes)]
            started = forks.start_ranks(drive_training.drive, jobs, outputs=outputs, sharded=sharded, settings=settings)
            results = forks.finish(started, outputs, seconds=900)
        assert [r.code for r in results] == [0] * n_processes, results
        return
    script = [str(HERE / "drive_training.py"), json.dumps(jobs)]
    result = subprocess.run(
        command(script, n_processes, sharded),
        env={**environment(sharded), **(settings or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def assert_stops_change_nothing(
    inputs: dict[str, Path],
    folder: Path,
    layout: tuple[int, bool],
    *more: object,
    loss: str = "distill",
    evaluates: bool = True,
) -> None:
    """Train with two stops and without; both runs are the same to the last bit. `layout` as in `drive`."""
    whole, pieces = folder / "whole", folder / "pieces"
    if evaluates:
        more = (*more, "--eval-data", inputs["held_out"], "--eval-every", 4)
    resume = {"arguments": ["resume", str(pieces)]}
    jobs = [
        {"arguments": arguments(inputs, whole, *more, loss=loss)},
        {"arguments": arguments(inputs, pieces, *more, loss=loss), "stop_in": 3},
        {**resume, "stop_in": 7},
        resume,
    ]
    drive(jobs, *layout)
    assert len(steps(whole)) == 12
    assert_same_run(whole, pieces)


def assert_layouts_train_alike(inputs: dict[str, Path], folder: Path, *more: object, n_steps: int = 4) -> None:
    """Check that the losses of all layouts agree but for the order of their sums."""
    losses = []
    for layout, how in LAYOUTS.items():
        drive([{"arguments": arguments(inputs, folder / layout, *more, steps=n_steps)}], *how)
        losses.append([loss for _, loss in steps(folder / layout, "loss")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def records(run: Path) -> list[dict[str, Any]]:
    """Read the metrics as strict parsers do, to which NaN is no number."""
    return [json.loads(line, parse_constant=_refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def steps(run: Path, *keys: str) -> list[tuple[Any, ...]]:
    """Return what was written down of each step."""
    return [tuple(r[key] for key in ("step", *keys)) for r in records(run) if "loss" in r]


def evaluations(run: Path) -> list[Any]:
    return [(r["step"], r["evaluation"]) for r in records(run) if "evaluation" in r]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [r for r in records(run) if r.get("event") == name]


def state(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "run_state.json").read_text())
    return content


def status(run: Path) -> tuple[str, int]:
    return state(run)["status"], state(run)["step"]


def checkpoints(run: Path) -> list[str]:
    """Return everything in the folder of checkpoints, hidden or not."""
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def assert_each_is_whole(run: Path) -> None:
    """Check that no checkpoint is there by its name whose files are not as they were written."""
    from uptrain.checkpoints.files import find_damage, list_checkpoints

    for folder in list_checkpoints(run / "checkpoints").values():
        assert not find_damage(folder)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a training checkpoint, weights and optimizer states."""
    reader = FileSystemReader(checkpoint / "tensors")
    entries = reader.read_metadata().state_dict_metadata
    loaded = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items() if _is_tensor(e)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(loaded, storage_reader=reader)
    assert any(name.startswith("model.") for name in loaded)
    assert any(name.startswith("optimizer.state.") for name in loaded)
    return loaded


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def assert_same_run(run: Path, other: Path) -> None:
    """Check that two runs are the same to the last bit: what they logged, and where they ended."""
    keys = ("loss", "grad_norm", "learning_rate", "tokens", "windows_crc32")
    assert steps(run, *keys) == steps(other, *keys)
    assert evaluations(run) == evaluations(other)
    ends = [max((r / "checkpoints").glob("step-*")) for r in (run, other)]
    assert ends[0].name == ends[1].name
    assert differing_tensors(*ends) == []


def differing_tensors(checkpoint: Path, other: Path) -> list[str]:
    """Return the names of the tensors that two training checkpoints do not have in common to the last bit."""
    first, second = tensors(checkpoint), tensors(other)
    common = {name for name in first.keys() & second.keys() if torch.equal(first[name], second[name])}
    return sorted((first.keys() | second.keys()) - common)
