"""Adapters (`--trainable lora`): they begin at the model, learn, resume exactly, and are merged at export."""

import json
import re

import numpy as np
import pytest
import tiny
import torch
from first_steps import batch
from real_runs import (
    LAYOUT_CASES,
    LAYOUTS,
    VOCAB,
    arguments,
    assert_layouts_train_alike,
    assert_same_run,
    assert_stops_change_nothing,
    drive,
    events,
    make_inputs,
    steps,
    tensors,
)

from model.decoder.transformers_model import TransformersModel
from uptrain.estimates.memory import MemoryEstimator, MemoryOptions
from uptrain.models.load import load_student
from uptrain.models.lora import AdaptedLinear, add_adapters, initialise_adapters

ADAPTED = re.compile(r"layers\.\d+\..*(_proj|dense|fc1|fc2)\.weight$")
LORA = ("--trainable", "lora", "--lora-rank", 4)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Write the model and its parent in bfloat16, in which frozen parameters stay."""
    return make_inputs(tmp_path_factory.mktemp("inputs"), "bfloat16", attention_bias=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "phi", "gemma"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_first_step_follows_from_that_of_full_training(tmp_path, family, dtype, autocast):
    """The loss is the same. The gradient of B is the weight's times Aᵀ, and that of A is 0 while B is."""
    folder = tiny.save(tiny.build(family, num_key_value_heads=2), tmp_path / "model", dtype)
    whole, adapted = load_student(folder).train(), load_student(folder, "lora", 3).train()
    initialise_adapters(adapted, seed=7)
    losses = []
    for student in (whole, adapted):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = student(*batch())
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    full, parameters = dict(whole.named_parameters()), dict(adapted.named_parameters())
    trained = {name for name, p in parameters.items() if p.requires_grad}
    assert trained == {name for name in parameters if "lora_" in name}
    matrices = [name for name in full if ADAPTED.search(name)]
    assert len(trained) == 2 * len(matrices) > 0
    for name in matrices:
        a, b = (parameters[name.replace("weight", f"lora_{which}.weight")] for which in "AB")
        assert (a.dtype, b.dtype, a.shape[0]) == (torch.float32, torch.float32, 3)
        assert 0 < a.abs().max() <= a.shape[1] ** -0.5
        assert not a.grad.any() and not b.any()
        expected = full[name].grad @ a.T
        assert (b.grad - expected).norm() <= (0.02 if autocast else 1e-5) * expected.norm(), name
        assert parameters[name].dtype == getattr(torch, dtype)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for an attribute of old
def test_against_peft(tmp_path):
    """The library gives the same logits with the same adapters, and merges them to W + B A, as export does."""
    import peft
    from transformers import AutoModelForCausalLM

    folder = tiny.save(tiny.build(num_key_value_heads=2), tmp_path / "model")
    ours = load_student(folder, "lora", 4)
    initialise_adapters(ours, seed=1)
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules="all-linear")
    hf_model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    names = dict(hf_model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            if "lora_B" in name:
                parameter.data.normal_(generator=generator, std=0.1)
            their_name = f"base_model.model.{name.replace('.weight', '.default.weight')}"
            assert names[their_name].shape == parameter.shape
            names[their_name].data.copy_(parameter.data)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert (ours(ids) - hf_model(ids).logits).abs().max() <= 1e-5
    merged, parameters = hf_model.merge_and_unload().state_dict(), dict(ours.named_parameters())
    adapted = [name.removesuffix("lora_A.weight") for name in parameters if name.endswith("lora_A.weight")]
    for name in adapted:
        w, a, b = (parameters[f"{name}{which}weight"].double() for which in ("", "lora_A.", "lora_B."))
        assert (merged[f"{name}weight"] - (w + b @ a)).abs().max() <= 1e-6 < (b @ a).abs().max()
    assert len(adapted) == 7 * len(ours.model.layers)


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_export_merges_the_adapters(inputs, tmp_path, uptrain, family):
    if family != "llama":
        model = tiny.build(family, vocab_size=VOCAB, num_key_value_heads=2)
        inputs = {**inputs, "model": tiny.save(model, tmp_path / family, "bfloat16")}
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, *LORA, steps=4)}])
    stored = tensors(run / "checkpoints/step-00000004")
    assert all("lora_" in name for name in stored if name.startswith("model.")), stored.keys()
    uptrain("export", run, tmp_path / "out").succeeded()
    uptrain("export", run, tmp_path / "wide", "--dtype", "float32").succeeded()
    before, after, wide = (tiny.tensors(folder) for folder in (inputs["model"], tmp_path / "out", tmp_path / "wide"))
    assert before.keys() == after.keys()
    prefix = "model.student." if family == "llama" else "model.student.hf_model."
    changed = set()
    for name, tensor in before.items():
        a, b = (stored.get(prefix + name.replace("weight", f"lora_{which}.weight")) for which in "AB")
        if a is None or not ADAPTED.search(name):
            assert torch.equal(after[name], tensor), name
            continue
        merged = tensor.double() + b.double() @ a.double()
        assert torch.equal(wide[name], merged.float()), name
        assert torch.equal(after[name], merged.float().bfloat16()), name
        changed |= {name} if not torch.equal(wide[name], tensor.float()) else set()
    assert changed == {name for name in before if ADAPTED.search(name)}
    record = json.loads((tmp_path / "out/uptraining.json").read_text())
    assert (record["settings"]["trainable"], record["settings"]["lora_rank"]) == ("lora", 4)


def test_the_linear_layers_of_falcon_are_adapted():
    student = TransformersModel(tiny.build("falcon", alibi=False))
    add_adapters(student, 2)
    adapted = {name for name, module in student.named_modules() if isinstance(module, AdaptedLinear)}
    assert {name.rsplit(".", 1)[1] for name in adapted} == {
        "query_key_value",
        "dense",
        "dense_h_to_4h",
        "dense_4h_to_h",
    }


def test_the_export_is_the_model_that_was_trained(inputs, tmp_path, uptrain):
    """Its held-out loss is that of the run's last evaluation."""
    run = tmp_path / "run"
    more = (*LORA, "--eval-data", inputs["held_out"], "--lr", 0.01)
    drive([{"arguments": arguments(inputs, run, *more, steps=4)}])
    uptrain("export", run, tmp_path / "out", "--dtype", "float32").succeeded()
    result = uptrain("evaluate", tmp_path / "out", "--data", inputs["held_out"], "--json")
    record = json.loads((tmp_path / "out/uptraining.json").read_text())
    first, *_, last = record["evaluations"]
    assert json.loads(result.out)["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert abs(first["loss"] - last["loss"]) > 1e-4


@pytest.mark.parametrize("layout", LAYOUT_CASES)
def test_stopped_and_resumed_is_bit_equal(inputs, tmp_path, layout):
    assert_stops_change_nothing(inputs, tmp_path, LAYOUTS[layout], *LORA, "--precision", "bf16")


@pytest.mark.slow
def test_layouts_train_alike(inputs, tmp_path):
    assert_layouts_train_alike(inputs, tmp_path, *LORA)


def test_sharing_the_body_changes_nothing(inputs, tmp_path):
    shared, apart = tmp_path / "shared", tmp_path / "apart"
    jobs = [
        {"arguments": arguments(inputs, shared, *LORA, loss="distill", steps=4)},
        {"arguments": arguments(inputs, apart, *LORA, loss="distill", steps=4), "apart": True},
    ]
    drive(jobs)
    assert_same_run(shared, apart)


def test_memory_counts_the_adapters(inputs):
    estimator = MemoryEstimator.read(inputs["model"], None, 32, lora_rank=4)
    needed = estimator.memory(MemoryOptions("lora", 1))
    student = load_student(inputs["model"], "lora", 4)
    n_trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    n_frozen = sum(p.nbytes for p in student.parameters() if not p.requires_grad)
    assert needed.masters == needed.gradients == 4 * n_trained
    assert needed.frozen == n_frozen
    assert needed.optimizer == 8 * n_trained


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lora-rank", 4), ["--lora-rank is for --trainable lora, not all"]),
        (("--trainable", "lora", "--lora-rank", 0), ["--lora-rank"]),
        (("--trainable", "lora", "--lora-rank", 10**6), ["--lora-rank 1000000 is more than", "the model's matrices"]),
    ],
)
def test_refusals(inputs, tmp_path, uptrain, options, words):
    uptrain(*arguments(inputs, tmp_path / "run", *options)).refused(*words)
    assert not (tmp_path / "run").exists()


def test_another_rank_does_not_fit_the_checkpoint(inputs, tmp_path, uptrain):
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, *LORA), "stop_in": 2}])
    content = json.loads((run / "run.json").read_text())
    content["settings"]["lora_rank"] = 5
    (run / "run.json").write_text(json.dumps(content))
    uptrain("resume", run).refused("does not fit the run's model")
    assert np.isfinite([loss for _, loss in steps(run, "loss")]).all()


@pytest.mark.parametrize("family", ["llama", "olmo"])
def test_a_model_can_be_the_teacher_of_its_own_adapters(tmp_path, family):
    """Then the teacher shares all that it has with the frozen part; OLMo's norms have no weights."""
    inputs = make_inputs(tmp_path / "inputs")
    model = tiny.save(tiny.build(family, vocab_size=VOCAB), tmp_path / family, "bfloat16")
    given = {**inputs, "model": model}
    more = ("--teacher", model, "--loss", "mix", "--trainable", "lora", "--precision", "bf16")
    drive([{"arguments": arguments(given, tmp_path / "run", *more, steps=6)}])
    (started,) = events(tmp_path / "run", "started")
    assert started["shared_bytes"] == sum(tensor.nbytes for tensor in tiny.tensors(model).values())
    assert np.isfinite([loss for _, loss in steps(tmp_path / "run", "loss")]).all()
