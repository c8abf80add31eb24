"""A teacher uses the frozen parameters of the student that are the same in both, and nothing else changes."""

import itertools

import pytest
import tiny
import torch
from real_runs import LAYOUTS, VOCAB, arguments, assert_same_run, drive, events, make_inputs, records

from model.decoder.transformers_model import HF_PREFIX
from uptrain.models.load import load_student, load_teacher, teacher_dtype
from uptrain.models.teacher_sharing import equal_tensors, share, shareable

PRECISIONS = ("fp32", "bf16")


def make_pair(folder, convert, family="llama", dtype="bfloat16", **changes):
    """Return a model and its parent, from which it was converted."""
    parent = tiny.save(tiny.build(family, vocab_size=VOCAB, **changes), folder / "parent", dtype)
    model = folder / "model"
    convert("mha-to-gqa", "--method", "mean", parent, model, "--groups", 2).succeeded()
    return model, parent


def load_pair(model, parent, precision, part="kv"):
    """Return student, teacher, and the names and bytes of what they share."""
    student, dtype = load_student(model, part), teacher_dtype(precision)
    shared = shareable(student, equal_tensors(model, part, parent), dtype)
    teacher = load_teacher(parent, precision, skip=shared, float32_states=False)
    return student, teacher, shared, share(shared, teacher, dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_what_is_shared_is_held_once(tmp_path, convert, family, dtype, precision):
    model, parent = make_pair(tmp_path, convert, family, dtype, tie_word_embeddings=family == "phi")
    student, teacher, shared, nbytes = load_pair(model, parent, precision)
    ours = dict(student.named_parameters())
    theirs = {name: teacher.get_parameter(name) for name in ours}
    same = {name for name, parameter in ours.items() if parameter is theirs[name]}
    assert ours.keys() - same == dict(teacher.named_parameters()).keys()
    assert nbytes == sum(ours[name].nbytes for name in same)
    assert {name.removeprefix(HF_PREFIX) for name in same} == shared.keys()
    to = teacher_dtype(precision)
    widens = family == "llama" and torch.promote_types(getattr(torch, dtype), to) == to
    for name in ours:
        assert (name in same) is (not tiny.is_kv(name) and ("norm" not in name or widens)), name
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in theirs.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_the_teacher_computes_the_same(tmp_path, convert, family, dtype, precision):
    model, parent = make_pair(tmp_path, convert, family, dtype)
    _, teacher, _, nbytes = load_pair(model, parent, precision, "attention")
    assert nbytes
    alone, ids = load_teacher(parent, precision, float32_states=False), torch.arange(24).view(2, 12)
    documents = (torch.arange(12) > 6).long().expand(2, -1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(teacher(ids, None, documents), alone(ids, None, documents))
        assert torch.equal(teacher.hidden(ids, documents), alone.hidden(ids, documents))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_a_bias_is_shared_without_its_weight(tmp_path, convert, family, dtype, precision):
    """As after the default merge, which refits the output projection, but not its bias."""
    biases = {"attention_bias": True} if family == "llama" else {}
    model, parent = make_pair(tmp_path, convert, family, dtype, **biases)
    name = f"model.layers.1.self_attn.{'o_proj' if family == 'llama' else 'dense'}"
    weights = tiny.tensors(model)
    weights[f"{name}.weight"][3, 5] += 1
    tiny.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    _, teacher, shared, _ = load_pair(model, parent, precision)
    assert f"{name}.weight" not in shared and f"{name}.bias" in shared
    alone, ids = load_teacher(parent, precision, float32_states=False), torch.arange(24).view(2, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(teacher(ids, None, None), alone(ids, None, None))


def test_a_tensor_that_differs_is_not_shared(tmp_path, convert):
    model, parent = make_pair(tmp_path, convert)
    everything = set(equal_tensors(model, "kv", parent))
    weights, name = tiny.tensors(parent), "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] += 1
    tiny.save_file(weights, parent / "model.safetensors", metadata={"format": "pt"})
    assert everything - set(equal_tensors(model, "kv", parent)) == {name}
    student, teacher, _, _ = load_pair(model, parent, "bf16")
    assert torch.equal(teacher.model.layers[1].mlp.up_proj.weight, weights[name])
    assert not torch.equal(student.model.layers[1].mlp.up_proj.weight, weights[name])


FAST = {("llama", "one process", "fp32"), ("phi", "one process", "bf16")}


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [
        pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow)
        for cell in itertools.product(("llama", "phi"), LAYOUTS, PRECISIONS)
    ],
)
def test_runs_are_the_same_to_the_last_bit(tmp_path, convert, family, layout, precision):
    """Also after a stop, when student and teacher are loaded again."""
    model, parent = make_pair(tmp_path, convert, family)
    inputs = {**make_inputs(tmp_path / "inputs"), "model": model, "parent": parent}
    more = ("--trainable", "attention", "--precision", precision, "--eval-data", inputs["held_out"], "--eval-every", 2)
    shared, apart = tmp_path / "shared", tmp_path / "apart"
    jobs = [
        {"arguments": arguments(inputs, shared, *more, loss="distill", steps=6), "stop_in": 3},
        {"arguments": ["resume", str(shared)]},
    ]
    drive(
        [*jobs, {"arguments": arguments(inputs, apart, *more, loss="distill", steps=6), "apart": True}],
        *LAYOUTS[layout],
    )
    assert_same_run(shared, apart)
    nbytes = [event["shared_bytes"] for name in ("started", "resumed") for event in events(shared, name)]
    assert nbytes == nbytes[:1] * 2
    assert nbytes[0] > 0.3 * sum(tensor.nbytes for tensor in tiny.tensors(model).values())
    assert "shared_bytes" not in events(apart, "started")[0]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kv", "lora"])
def test_shards_train_as_one_process_does(tmp_path, convert, part):
    model, parent = make_pair(tmp_path, convert)
    inputs = {**make_inputs(tmp_path / "inputs"), "model": model, "parent": parent}
    losses, shared = [], []
    for layout in ("one process", "FSDP2 x 2"):
        run = tmp_path / layout
        more = ("--trainable", part, "--activation-checkpointing")
        drive([{"arguments": arguments(inputs, run, *more, loss="distill", steps=4)}], *LAYOUTS[layout])
        shared.append(events(run, "started")[0]["shared_bytes"])
        losses.append([event["loss"] for event in records(run) if "loss" in event])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-7)
    assert shared[0] == shared[1]
