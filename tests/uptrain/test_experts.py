"""Mixtures of experts: attention alone is trained, and the experts stay as their files hold them."""

import json

import pytest
import tiny
import torch
from real_runs import (
    LAYOUT_CASES,
    LAYOUTS,
    VOCAB,
    arguments,
    assert_layouts_train_alike,
    assert_stops_change_nothing,
    drive,
    events,
    make_inputs,
    tensors,
)
from transformers import AutoModelForCausalLM

from uptrain.models.load import load_student, load_teacher, teacher_dtype
from uptrain.models.stored_names import stored_names
from uptrain.models.teacher_sharing import equal_tensors, share, shareable

JOINED = (
    "dots1", "flex_olmo", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_moe", "solar_open",
)  # fmt: skip
EXPERTS = (*JOINED, "gpt_oss")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Write a merged OLMoE in bfloat16, its parent, and data."""
    folder = tmp_path_factory.mktemp("inputs")
    made = make_inputs(folder)
    for name, n_kv_heads in (("model", 2), ("parent", 8)):
        model = tiny.build("olmoe", vocab_size=VOCAB, num_key_value_heads=n_kv_heads)
        made[name] = tiny.save(model, folder / f"olmoe-{name}", "bfloat16")
    return made


def is_trained(name):
    return "self_attn." in name or "input_layernorm" in name


def packed():
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    return ids, (torch.arange(24) > 9).long().expand(2, -1)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_keep_their_dtype_and_compute_as_float32_copies(tmp_path, family, dtype):
    folder = tiny.save(tiny.build(family), tmp_path / "model", dtype)
    student, copies = load_student(folder, "attention"), load_student(folder, "attention").float()
    ids, documents = packed()
    for name, parameter in student.named_parameters():
        if ".experts." in name:
            assert (parameter.dtype, parameter.requires_grad) == (getattr(torch, dtype), False)
    for precision in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            losses = [model(ids, ids, documents)[0] for model in (student, copies)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for ours, theirs in zip(student.parameters(), copies.parameters(), strict=True):
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_teacher_shares_the_experts(tmp_path, convert, family, dtype, precision):
    parent, model = tiny.save(tiny.build(family), tmp_path / "parent", dtype), tmp_path / "model"
    convert("mha-to-gqa", "--method", "mean", parent, model, "--groups", 2).succeeded()
    student = load_student(model, "attention")
    shared = shareable(student, equal_tensors(model, "attention", parent), teacher_dtype(precision))
    assert any(".experts." in name for name in shared)
    teacher = load_teacher(parent, precision, float32_states=False)
    share(shared, teacher, teacher_dtype(precision))
    assert not any(".experts." in name for name, _ in teacher.named_parameters())
    alone, (ids, documents) = load_teacher(parent, precision, float32_states=False), packed()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(teacher(ids, None, documents), alone(ids, None, documents))


@pytest.mark.parametrize("family", JOINED)
def test_an_expert_that_differs_is_not_shared(tmp_path, family):
    """All others of its layer are not shared either: transformers holds them as one parameter."""
    parent, model = (tiny.save(tiny.build(family), tmp_path / name) for name in ("parent", "model"))
    everything = set(equal_tensors(model, "attention", parent))
    (name, (changed, *others)) = next(
        (name, stored) for name, stored in stored_names(model).items() if ".experts." in name
    )
    weights = tiny.tensors(model)
    weights[changed].flatten()[3] += 1
    tiny.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    lost = everything - set(equal_tensors(model, "attention", parent))
    assert name in lost and all(".experts." in each for each in lost)
    assert family in ("granitemoe", "granitemoeshared") or others


@pytest.mark.parametrize("family", JOINED)
def test_an_export_keeps_the_bytes_of_the_experts(inputs, tmp_path, uptrain, family):
    model = tiny.save(tiny.build(family, vocab_size=VOCAB, num_key_value_heads=2), tmp_path / family, "bfloat16")
    run = tmp_path / "run"
    drive([{"arguments": arguments({**inputs, "model": model}, run, "--trainable", "attention", steps=4)}])
    stored = [name for name in tensors(run / "checkpoints/step-00000004") if name.startswith("model.")]
    assert all(is_trained(name) or name.endswith("e_score_correction_bias") for name in stored)  # a buffer of dots1
    uptrain("export", run, tmp_path / "out").succeeded()
    before, after = tiny.tensors(model), tiny.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) or is_trained(name), name
        assert not torch.equal(tensor, before[name]) or "_proj." not in name or not is_trained(name), name
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("layout", LAYOUT_CASES)
def test_stopped_and_resumed_is_bit_equal(inputs, tmp_path, layout):
    """FSDP2 gathers the student's experts for its teacher."""
    assert_stops_change_nothing(inputs, tmp_path, LAYOUTS[layout], "--trainable", "attention", "--precision", "bf16")


@pytest.mark.slow
def test_layouts_train_alike(inputs, tmp_path):
    assert_layouts_train_alike(inputs, tmp_path, "--trainable", "attention")


def test_the_default_after_a_merge_trains(inputs, tmp_path, convert, uptrain):
    """Without options for it. A changed expert in MODEL is found when the run goes on."""
    parent, model, run = inputs["parent"], tmp_path / "merged", tmp_path / "run"
    convert("mha-to-gqa", "--method", "mean", parent, model, "--groups", 2).succeeded()
    inputs = {**inputs, "model": model}
    uptrain(*arguments(inputs, run, "--max-minutes", 0.0001, loss="distill")).succeeded()
    assert json.loads((run / "run.json").read_text())["settings"]["trainable"] == "attention"
    (started,) = events(run, "started")
    frozen = sum(p.nbytes for n, p in load_student(model, "attention").named_parameters() if ".experts." in n)
    assert started["shared_bytes"] >= frozen
    weights = tiny.tensors(model)
    weights["model.layers.1.mlp.experts.1.up_proj.weight"][3, 5] += 1
    tiny.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    uptrain("resume", run).refused("holds other tensors than when the run began")


@pytest.mark.parametrize("part", ["all", "lora"])
def test_other_parts_are_refused(inputs, tmp_path, uptrain, part):
    uptrain(*arguments(inputs, tmp_path / "run", "--trainable", part)).refused(
        f"--trainable {part}", "'olmoe'", "use --trainable attention"
    )
