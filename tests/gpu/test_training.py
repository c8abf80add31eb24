"""Runs on GPUs, stopped and resumed, against the same runs on the CPU: `scripts/test --all --gpu tests/gpu`."""

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import real_runs
import torch
from small_training import make_training

from uptrain.distributed.accelerator import uses_gpu
from uptrain.training.loop import TrainingProgress, train

ROOT = Path(__file__).parents[2]
STEPS, STOP_IN = 12, 5
LAYOUTS = [
    (1, False),
    (1, True),  # FSDP2 and NCCL on a machine with one GPU
    pytest.param(2, False, marks=pytest.mark.slow),
    pytest.param(2, True, marks=pytest.mark.slow),
]
"""Number of processes, and whether they shard."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return models with heads of 8, the fewest that flash attention takes."""
    return real_runs.make_inputs(tmp_path_factory.mktemp("inputs"), hidden_size=64)


def arguments(inputs, run):
    held_out = ("--eval-data", inputs["held_out"], "--eval-every", 4, "--save-every-steps", 4)
    return real_runs.arguments(inputs, run, *held_out, loss="distill", steps=STEPS)


@pytest.fixture(scope="module")
def expected(inputs, tmp_path_factory):
    """Return what a run in float32 on the CPU writes down."""
    run = tmp_path_factory.mktemp("expected") / "run"
    real_runs.drive([{"arguments": arguments(inputs, run)}], on_cpu=True)
    return real_runs.records(run)


def losses(records):
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.parametrize(("processes", "sharded"), LAYOUTS)
def test_distillation(tmp_path, device, inputs, expected, processes, sharded):
    """As the command runs without options: in bfloat16 on GPUs."""
    if uses_gpu() and torch.accelerator.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    run = tmp_path / "run"
    first = {"arguments": arguments(inputs, run), "stop_in": STOP_IN}
    real_runs.drive([first, {"arguments": ["resume", str(run)]}], processes, sharded)
    records_on_device = real_runs.records(run)
    assert {r["device"] for r in records_on_device if r.get("event") in ("started", "resumed")} == {device.type}
    precision = json.loads((run / "run.json").read_text())["settings"]["precision"]
    assert precision == ("bf16" if uses_gpu() else "fp32")
    assert losses(records_on_device) == pytest.approx(losses(expected), rel=0.02)
    assert len(losses(records_on_device)) == STEPS
    last, wanted = (
        [r["evaluation"] for r in records if "evaluation" in r][-1] for records in (records_on_device, expected)
    )
    assert last["loss"] == pytest.approx(wanted["loss"], rel=0.01)
    assert last["kl"] == pytest.approx(wanted["kl"], rel=0.05)


@pytest.mark.usefixtures("gpu_only")
def test_evaluation(device, inputs):
    """As on the CPU, in float32 and in bfloat16. Each in a process of its own, since accelerate keeps its precision."""

    def evaluate(device, precision):
        more = (
            "--teacher",
            inputs["parent"],
            "--data",
            inputs["held_out"],
            "--device",
            device,
            "--precision",
            precision,
        )
        command = [sys.executable, "-m", "uptrain", "evaluate", inputs["model"], *more, "--json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)

    on_cpu = evaluate("cpu", "fp32")
    for precision, rel in (("fp32", 1e-3), ("bf16", 0.02)):
        result = evaluate(device.type, precision)
        assert result["loss"] == pytest.approx(on_cpu["loss"], rel=rel)
        assert result["teacher_loss"] == pytest.approx(on_cpu["teacher_loss"], rel=rel)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [(), ("--activation-checkpointing",)])
def test_compiled_layers(tmp_path, inputs, expected, more):
    run = tmp_path / "run"
    real_runs.drive([{"arguments": [*arguments(inputs, run), "--compile", *more]}])
    assert losses(real_runs.records(run)) == pytest.approx(losses(expected), rel=0.02)


def test_a_step_waits_for_the_device_once(tmp_path, device):
    """And copies its batches without blocking; `tests/uptrain/test_training_loop.py` counts calls on the CPU."""
    if device.type != "cuda":
        pytest.skip("CUDA reports what waits for it")
    waits = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = make_training(tmp_path, 6, lambda record: waits.append(len(caught)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(training, TrainingProgress())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    of_records = waits[1::2]  # an update and a record in turn
    assert [after - before for before, after in itertools.pairwise(of_records[1:])] == [1] * 4
