"""A run on GPUs, stopped and resumed, against the same run on the CPU: `scripts/test --all --gpu tests/gpu`."""

import json

import pytest
import torch
import training

from uptrain.parallel import has_accelerator

STEPS, STOP_IN = 12, 5
MANY = [pytest.param(2, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("processes", "sharded"), [(1, False), *MANY])
def test_distillation(tmp_path, device, distilled, processes, sharded):
    """The session's `distilled` run is in float32 on the CPU; this one is as the command runs without options."""
    if has_accelerator() and torch.accelerator.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    inputs, run = training.make_inputs(tmp_path), tmp_path / "run"
    more = ("--eval-data", inputs["held_out"], "--eval-every", 4, "--save-every-steps", 4)
    first = {"arguments": training.arguments(inputs, run, *more, loss="distill", steps=STEPS), "stop_in": STOP_IN}
    training.drive([first, {"arguments": ["resume", str(run)]}], processes, sharded)
    found, expected = training.records(run), training.records(distilled)
    assert {r["device"] for r in found if r.get("event") in ("started", "resumed")} == {device.type}
    precision = json.loads((run / "run.json").read_text())["settings"]["precision"]
    assert precision == ("bf16" if has_accelerator() else "fp32")
    losses, wanted = ({r["step"]: r["loss"] for r in records if "loss" in r} for records in (found, expected))
    assert losses == pytest.approx(wanted, rel=0.02)
    assert sorted(losses) == list(range(1, STEPS + 1))
    last, wanted = ([r["evaluation"] for r in records if "evaluation" in r][-1] for records in (found, expected))
    assert last["loss"] == pytest.approx(wanted["loss"], rel=0.01)
    assert last["kl"] == pytest.approx(wanted["kl"], rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers(tmp_path, device, distilled):
    inputs, run = training.make_inputs(tmp_path), tmp_path / "run"
    training.drive([{"arguments": training.arguments(inputs, run, "--compile", loss="distill", steps=STEPS)}])
    losses, wanted = ([r["loss"] for r in training.records(x) if "loss" in r] for x in (run, distilled))
    assert losses == pytest.approx(wanted, rel=0.02)
