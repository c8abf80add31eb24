"""Latent attention is trained without the norm of its latent, resumed to the bit, and exported with it."""

import json

import latent
import pytest
import tiny
import torch
from real_runs import VOCAB, arguments, assert_same_run, drive, make_inputs, records, tensors
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from model import load_model


def inputs_of(convert, folder, norm):
    inputs = make_inputs(folder)
    parent = latent.make_source(folder / "wide", vocab_size=VOCAB, rms_norm_eps=1e-5)
    size = ("--latent", 12, "--rope", 8, "--latent-norm", norm, "--calibration", "none")
    convert("mha-to-mla", parent, folder / "mla", *size).succeeded()
    return {**inputs, "model": folder / "mla", "parent": parent}


@pytest.mark.parametrize("norm", ["eps", "bias"])
def test_trained_resumed_and_exported(convert, uptrain, tmp_path, norm):
    inputs, run, other = inputs_of(convert, tmp_path, norm), tmp_path / "run", tmp_path / "other"
    more = ("--trainable", "all", "--eval-data", inputs["held_out"], "--save-every", 4)
    drive([{"arguments": arguments(inputs, run, *more, loss="distill")}], on_cpu=True)
    resume = {"arguments": ["resume", str(other)]}
    stopped = {"arguments": arguments(inputs, other, *more, loss="distill"), "stop_in": 5}
    drive([stopped, resume], on_cpu=True)
    assert_same_run(run, other)
    losses = [r["loss"] for r in records(run) if "loss" in r]
    assert losses[-1] < losses[0]
    uptrain("export", run, tmp_path / "out", "--dtype", "float32").succeeded()
    live, prefix = load_model(inputs["model"], torch.float32), "model.student."
    weights = tensors(max((run / "checkpoints").glob("step-*")))
    live.load_state_dict({name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)})
    ids = torch.randint(0, VOCAB, (2, 24))
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    with torch.inference_mode():
        expected = live(ids)
        assert (model(ids).logits - expected).abs().max() <= 1e-4
        assert (load_model(tmp_path / "out")(ids) - expected).abs().max() <= 1e-5
        assert (load_model(inputs["model"])(ids) - expected).abs().max() > 1e-3  # it was trained
    assert tiny.tensors(tmp_path / "out").keys() == tiny.tensors(inputs["model"]).keys()
    uptrain("export", run, tmp_path / "half", "--dtype", "bfloat16").succeeded()
    with torch.inference_mode():
        assert (load_model(tmp_path / "half", torch.float32)(ids) - expected).abs().max() <= 0.02
        assert (latent.open_stock(tmp_path / "half")(ids).logits - expected).abs().max() <= 0.02


def test_planned(convert, uptrain, tmp_path):
    inputs = inputs_of(convert, tmp_path, "eps")
    options = ("--alpha", 0.01, "--original-tokens", "400k", "--lr", 1e-3, "--global-batch-tokens", 512, "--json")
    plan = json.loads(uptrain("plan", inputs["model"], *options).out)
    assert (plan["n_kv_heads"], plan["steps"]) == (8, 8)
    assert plan["memory"]["all"]["masters_bytes"] == 4 * plan["n_params"]
    masters = [plan["memory"][part]["masters_bytes"] for part in ("lora", "kv", "attention", "all")]
    assert 0 < masters[1] < masters[2] < masters[3]
    assert 0 < masters[0] < masters[3]


def test_generates(convert, generation, tmp_path):
    source = make_tokenizer(latent.make_source(tmp_path / "source", vocab_size=300), 300)
    options = ("--latent", 12, "--rope", 8, "--calibration", "none")
    convert("mha-to-mla", source, tmp_path / "mla", *options).succeeded()
    result = generation(tmp_path / "mla", "--prompt", "The folder", "--max-new-tokens", 4).succeeded()
    assert "a latent of 12 and a key of 8 for 8 query heads" in result.err


def test_the_plan_names_latent_attention_of_the_model_and_of_a_teacher(convert, uptrain, tmp_path):
    inputs, other = inputs_of(convert, tmp_path, "eps"), tmp_path / "other"
    options = ("--latent", 14, "--rope", 8, "--calibration", "none")
    convert("mha-to-mla", inputs["parent"], other, *options).succeeded()
    fixed = ("--steps", 5, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32)
    planned = uptrain("plan", inputs["model"], "--teacher", other, *fixed).succeeded()
    assert "latent attention (12 + 8 elements cached)" in planned.out
    warning = f"the teacher {other} has latent attention, but the parent of {inputs['model']} had 8 K/V heads"
    assert warning in planned.err
    planned = uptrain("plan", inputs["model"], "--teacher", inputs["parent"], *fixed, "--json").succeeded()
    assert json.loads(planned.out)["latent"] == [12, 8]
    assert "the teacher" not in planned.err
