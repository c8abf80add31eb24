"""Training a part of latent attention: the rest keeps its bytes, and a teacher that has the same bytes shares it."""

import json
import re

import latent
import pytest
import tiny
import torch
from damage import edit_tensors
from first_steps import assert_first_step_is_of_full_training, batch
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
    tensors,
)

from model import load_model
from uptrain.estimates.memory import MemoryEstimator, MemoryOptions
from uptrain.models.load import load_student, load_teacher, teacher_dtype
from uptrain.models.lora import initialise_adapters
from uptrain.models.teacher_sharing import equal_tensors, share, shareable

PARTS = ("attention", "kv", "lora")
OF_PART = {
    "attention": re.compile(r"self_attn\.|input_layernorm"),
    "kv": re.compile(r"self_attn\.(kv_a_proj_with_mqa|kv_b_proj)\."),
    "lora": re.compile(r"\.lora_[AB]\."),
}
WRITTEN = re.compile(r"self_attn\.|input_layernorm"), re.compile(r"self_attn\.kv_"), re.compile(r"_proj|_with_mqa")
"""The tensors of an export that may differ from those before, by part."""


def make_pair(convert, folder, dtype="bfloat16", norm="eps", epsilon=1e-5, **changes):
    """Write a parent and its conversion to latent attention."""
    parent = latent.make_source(folder / "parent", dtype=dtype, vocab_size=VOCAB, rms_norm_eps=epsilon, **changes)
    size = ("--latent", 12, "--rope", 8, "--latent-norm", norm, "--calibration", "none")
    convert("mha-to-mla", parent, folder / "mla", *size).succeeded()
    return {"model": folder / "mla", "parent": parent}


@pytest.fixture
def inputs(convert, tmp_path):
    return {**make_inputs(tmp_path / "inputs"), **make_pair(convert, tmp_path / "pair")}


@pytest.mark.parametrize("part", ["attention", "kv"])
@pytest.mark.parametrize(("dtype", "norm"), [("float32", "eps"), ("bfloat16", "eps"), ("float16", "bias")])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_first_step_is_that_of_full_training(convert, tmp_path, dtype, norm, part, autocast):
    folder = make_pair(convert, tmp_path, dtype, norm)["model"]
    assert_first_step_is_of_full_training(folder, part, OF_PART[part], autocast)


def test_adapters_begin_at_the_model(convert, tmp_path):
    folder = make_pair(convert, tmp_path)["model"]
    whole, adapted = load_student(folder), load_student(folder, "lora", 3)
    initialise_adapters(adapted, seed=7)
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * len([n for n, p in whole.named_parameters() if p.ndim == 2 and "layers." in n])
    with torch.no_grad():
        assert whole(*batch())[0].item() == pytest.approx(adapted(*batch())[0].item(), rel=1e-6)


@pytest.mark.parametrize("part", PARTS)
def test_only_trained_parameters_have_masters(convert, tmp_path, part):
    for name, parameter in load_student(make_pair(convert, tmp_path)["model"], part, 4).named_parameters():
        trained = bool(OF_PART[part].search(name))
        assert parameter.requires_grad is trained, name
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
@pytest.mark.parametrize("part", PARTS)
def test_a_teacher_with_heads_shares_the_rest(convert, tmp_path, part, epsilon, precision):
    """Where the norms' epsilon changes, embedding, o_proj and down_proj are rescaled, so they differ.

    Without a calibration, o_proj is otherwise the parent's.
    """
    pair = make_pair(convert, tmp_path, epsilon=epsilon, num_key_value_heads=4)
    student, dtype = load_student(pair["model"], part, 4), teacher_dtype(precision)
    shared = shareable(student, equal_tensors(pair["model"], part, pair["parent"]), dtype)
    teacher = load_teacher(pair["parent"], precision, skip=shared, float32_states=False)
    nbytes = share(shared, teacher, dtype)
    whole = load_teacher(pair["parent"], precision, float32_states=False)
    ours, theirs = dict(student.named_parameters()), dict(whole.named_parameters())
    same = {name for name in ours.keys() & theirs.keys() if teacher.get_parameter(name) is ours[name]}
    changed = re.compile(r"self_attn|embed_tokens|down_proj" if epsilon == 1e-5 else "self_attn.[qkv]_")
    assert same == {n for n in theirs if not changed.search(n) and not OF_PART[part].search(n)}
    assert nbytes == sum(ours[name].nbytes for name in same) > 0
    alone = load_teacher(pair["parent"], precision, float32_states=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(teacher(batch()[0]), alone(batch()[0]))
    estimator = MemoryEstimator.read(pair["model"], pair["parent"], 32, precision, lora_rank=4)
    widths = sum((2 if precision == "bf16" else 4) * ours[name].numel() for name in same)
    assert estimator.memory(MemoryOptions(part, 1)).shared == widths


def test_sharing_changes_nothing(inputs, tmp_path):
    """Also after a stop, when student and teacher are loaded again."""
    more = ("--trainable", "attention", "--eval-data", inputs["held_out"], "--eval-every", 2)
    shared, apart = tmp_path / "shared", tmp_path / "apart"
    jobs = [
        {"arguments": arguments(inputs, shared, *more, loss="distill", steps=6), "stop_in": 3},
        {"arguments": ["resume", str(shared)]},
        {"arguments": arguments(inputs, apart, *more, loss="distill", steps=6), "apart": True},
    ]
    drive(jobs)
    assert_same_run(shared, apart)
    nbytes = [event["shared_bytes"] for name in ("started", "resumed") for event in events(shared, name)]
    assert nbytes == nbytes[:1] * 2
    assert "shared_bytes" not in events(apart, "started")[0]


@pytest.mark.parametrize("part", ["all", *PARTS])
@pytest.mark.parametrize("layout", LAYOUT_CASES)
def test_stopped_and_resumed_is_bit_equal(inputs, tmp_path, layout, part):
    precision = "fp32" if part == "kv" else "bf16"
    assert_stops_change_nothing(inputs, tmp_path, LAYOUTS[layout], "--trainable", part, "--precision", precision)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_layouts_train_alike(inputs, tmp_path, part):
    assert_layouts_train_alike(inputs, tmp_path, "--trainable", part)


@pytest.mark.parametrize("norm", ["eps", "bias"])
@pytest.mark.parametrize("part", PARTS)
def test_an_export_is_the_model_that_was_trained(convert, uptrain, tmp_path, part, norm):
    """In the stock class too; and the tensors that were not trained keep their bytes."""
    inputs = {**make_inputs(tmp_path / "inputs"), **make_pair(convert, tmp_path / "pair", norm=norm)}
    run, rank = tmp_path / "run", ("--lora-rank", 4) if part == "lora" else ()
    more = ("--trainable", part, *rank, "--lr", 0.01)
    drive([{"arguments": arguments(inputs, run, *more, loss="distill", steps=6)}], on_cpu=True)
    stored, prefix = tensors(run / "checkpoints/step-00000006"), "model.student."
    weights = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
    assert weights and all(OF_PART[part].search(name) for name in weights), weights.keys()
    live = load_student(inputs["model"], part, 4)
    live.load_state_dict(weights, strict=False)
    uptrain("export", run, tmp_path / "out").succeeded()
    uptrain("export", run, tmp_path / "wide", "--dtype", "float32").succeeded()
    before, after = tiny.tensors(inputs["model"]), tiny.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    written, differing = WRITTEN[PARTS.index(part)], set()
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        differing |= set() if torch.equal(tensor, before[name]) else {name}
    assert all(written.search(name) for name in differing), differing
    assert any("kv_b_proj" in name for name in differing)
    with torch.inference_mode():
        expected = live(batch()[0])
        assert (latent.open_stock(tmp_path / "wide")(batch()[0]).logits - expected).abs().max() <= 1e-4
        assert (load_model(tmp_path / "wide")(batch()[0]) - expected).abs().max() <= 1e-5
        assert (load_model(inputs["model"], torch.float32)(batch()[0]) - expected).abs().max() > 1e-2  # it was trained


def test_attention_is_the_default_after_a_conversion(inputs, tmp_path, uptrain):
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, loss="distill", steps=4)}], on_cpu=True)
    assert json.loads((run / "run.json").read_text())["settings"]["trainable"] == "attention"
    options = ("--steps", 4, "--lr", 1e-3, "--global-batch-tokens", 512, "--memory", "64GB", "--json")
    plan = json.loads(uptrain("plan", inputs["model"], "--teacher", inputs["parent"], *options).out)
    assert "--trainable attention" in plan["memory"]["fitting"]["1"]["command"]


def test_memory_counts_what_is_trained(inputs):
    estimator = MemoryEstimator.read(inputs["model"], None, 32, lora_rank=4)
    for part in PARTS:
        student, needed = load_student(inputs["model"], part, 4), estimator.memory(MemoryOptions(part, 1))
        assert needed.masters == 4 * sum(p.numel() for p in student.parameters() if p.requires_grad), part
        assert needed.frozen == sum(p.nbytes for p in student.parameters() if not p.requires_grad), part


def test_another_model_is_refused(inputs, tmp_path, uptrain):
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, "--trainable", "kv"), "stop_in": 2}])

    def edit(name, tensor):
        return tensor + (1 if name.endswith("layers.1.self_attn.q_proj.weight") else 0)

    edit_tensors(inputs["model"], edit)
    for command in (("resume", run), ("export", run, tmp_path / "out")):
        uptrain(*command).refused("holds other tensors than when the run began")
    assert not (tmp_path / "out").exists()
