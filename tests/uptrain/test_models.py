"""What is trained, how it begins when it is trained from scratch, and which optimizer trains it."""

import itertools
import re
import resource
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import transformers

from model import load_model
from model.common.errors import InputError
from model.decoder import attention
from uptrain.models.decoder_layers import compile_layers, decoder_layers, layer_class_names, recompute_activations
from uptrain.models.frozen_parameters import freeze_all_but
from uptrain.models.load import (
    load_evaluated,
    load_student,
    load_teacher,
    random_student,
    uninitialized_student,
    uninitialized_teacher,
)
from uptrain.runs.checks import check_layer_names
from uptrain.training.adafactor import Adafactor
from uptrain.training.optimizer import make_optimizer

N_LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny.build(attention_bias=True, num_hidden_layers=N_LAYERS)
    return tiny.save(model, tmp_path_factory.mktemp("students") / "model")


@pytest.fixture
def student(folder):
    return load_model(folder, torch.float32)


def test_only_matrices_decay(student):
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    optimizer = make_optimizer("adamw", student, 0.1)
    decays = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays.keys() == set(names.values())
    for name, decay in decays.items():
        assert decay == (0.0 if name.endswith("bias") or "norm" in name or "embed" in name else 0.1), name


@pytest.mark.parametrize(
    ("family", "config", "spared"),
    [
        ("cohere", {"use_qk_norm": True}, r"norm|embed"),  # a row of the norm for each head
        ("gpt_oss", {}, r"norm|embed|bias|sinks"),  # a bias for each expert
        ("mpt", {}, r"norm|wte"),
        ("gpt_neox", {"tie_word_embeddings": False}, r"norm|embed_in|bias"),  # its LM head is called embed_out
    ],
)
def test_what_does_not_decay_in_classes_of_transformers(family, config, spared):
    model = tiny.build(family, **config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_optimizer("adamw", model, 0.1).param_groups
    decays = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert {name for name, decay in decays.items() if not decay} == {n for n in decays if re.search(spared, n)}
    assert decays.keys() == set(names.values())


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("gemma2", True), ("gpt_neox", False)])
def test_uninitialized_models_are_like_loaded_ones_without_weights(tmp_path, family, tied):
    """FSDP2's other processes make them. Drawing weights would fill the host's memory once for each process."""
    folder = tiny.save(tiny.build(family, tie_word_embeddings=tied), tmp_path / family)
    before = torch.get_rng_state()
    for unread, loaded in (
        (uninitialized_student(folder), load_student(folder)),
        (uninitialized_student(folder, "attention"), load_student(folder, "attention")),
        (uninitialized_teacher(folder, "bf16"), load_teacher(folder, "bf16", float32_states=False)),
    ):
        assert torch.equal(torch.get_rng_state(), before)
        kinds = [
            {name: (p.dtype, p.shape, p.device) for name, p in each.named_parameters()} for each in (unread, loaded)
        ]
        assert kinds[0] == kinds[1], "with one name for a tied tensor"
        own, theirs = dict(unread.named_buffers()), dict(loaded.named_buffers())
        assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
        with torch.no_grad():
            unread.load_state_dict(loaded.state_dict())
            ids = torch.arange(8)[None]
            assert torch.equal(unread(ids), loaded(ids))


@pytest.mark.parametrize("part", ["attention", "lora"])
def test_uninitialized_models_take_no_memory_before_they_are_written(tmp_path, part):
    """A class of transformers is made in float32, then gets the checkpoint's dtype."""
    model = tiny.build("gemma2", vocab_size=2**17, hidden_size=256, tie_word_embeddings=False)
    folder = tiny.save(model, tmp_path / "model", "bfloat16")
    uninitialized_student(folder, part, 4)  # imports, and what they cache
    before = resident_bytes()
    student = uninitialized_student(folder, part, 4)
    held = sum(parameter.nbytes for parameter in student.parameters())
    assert held > 130e6
    assert resident_bytes() - before < 0.1 * held


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gpt_neox", "falcon", "gpt_oss", "phi", "olmo", "nanochat"]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_evaluated_models_compute_as_students_in_half_of_their_memory(tmp_path, family, autocast):
    config = {"bias": False} if family == "falcon" else {}  # its class rounds a bias in another place
    folder = tiny.save(tiny.build(family, **config), tmp_path / family, "bfloat16")
    evaluated, student = load_evaluated(folder), load_student(folder)
    own, whole = (sum(parameter.nbytes for parameter in each.parameters()) for each in (evaluated, student))
    assert own < (0.8 if family == "gpt_oss" else 0.6) * whole, "only norms and experts stay wide"
    assert not any(parameter.requires_grad for parameter in evaluated.parameters())
    ids, documents = torch.arange(16)[None], torch.tensor([[0] * 7 + [1] * 9])
    with torch.no_grad(), torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        for packing in ({}, {} if family == "falcon" else {"documents_BT": documents}):  # ours has ALiBi
            assert torch.equal(evaluated(ids, **packing), student(ids, **packing))


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adafactor", Adafactor)])
def test_optimizers(folder, student, name, kind):
    freeze_all_but(student, "kv", folder)
    optimizer = make_optimizer(name, student, 0.0)
    assert type(optimizer) is kind
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    assert trained == 4 * N_LAYERS  # weights and biases
    if name == "adamw":
        assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


def test_masters_are_float32(student):
    with pytest.raises(AssertionError, match="bfloat16"):
        make_optimizer("adamw", student.bfloat16(), 0.0)


def test_begun_from_nothing(folder):
    """As GPT-2: normal, and smaller where it is added to the stream."""
    tiny.edit_config(folder, initializer_range=0.05)
    student, again, other = (dict(random_student(folder, seed).named_parameters()) for seed in (0, 0, 1))
    for name, parameter in student.items():
        assert torch.equal(parameter, again[name]), name
        if "norm" in name or name.endswith("bias"):
            assert (parameter == float("norm" in name)).all(), name
            continue
        assert not torch.equal(parameter, other[name]), name
        std = 0.05 / (2 * N_LAYERS) ** 0.5 if "o_proj" in name or "down_proj" in name else 0.05
        assert parameter.std().item() == pytest.approx(std, rel=0.06), name
        assert abs(parameter.mean().item()) < 0.1 * std, name


def test_recomputing_activations_changes_no_gradient(folder):
    ids, documents = torch.arange(24).view(2, 12), torch.zeros(2, 12, dtype=torch.long)
    gradients, calls = [], []
    for recompute in (False, True):
        student = load_model(folder, torch.float32)
        if recompute:
            recompute_activations(decoder_layers(student))
        seen = []
        student.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        student(ids, ids, documents)[0].backward()
        calls.append(len(seen))
        gradients.append({name: parameter.grad for name, parameter in student.named_parameters()})
    assert calls == [1, 2]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("lengths", [(6,), (2, 4)])
def test_recomputed_layers_are_compiled(student, monkeypatch, lengths):
    """torch.compile passes over what it cannot follow without a word, such as attention by segments in such a layer."""
    monkeypatch.setattr(attention, "by_segment", attention.by_segment)  # what is changed there is put back
    ids = torch.arange(12).view(2, 6)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, 6)
    expected, _ = student(ids, ids, documents)
    runs = []

    def backend(graph, inputs):
        def run(*arguments):
            runs.append(1)
            return graph.forward(*arguments)

        return run

    torch._dynamo.reset()
    compile_layers(decoder_layers(student), backend=backend)
    recompute_activations(decoder_layers(student))
    loss, _ = student.train()(ids, ids, documents)
    forward = len(runs)
    assert forward >= len(decoder_layers(student))
    loss.backward()
    assert len(runs) == 2 * forward
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_are_compiled_once_whatever_the_documents(student, monkeypatch):
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    monkeypatch.setattr(attention, "by_segment", attention.by_segment)  # what is changed there is put back
    ids, counter, counts = torch.arange(24).view(2, 12), CompileCounter(), []
    layouts = [torch.arange(24).view(2, 12) // n for n in (7, 5, 3, 2, 1)]  # of 4 to 24 documents
    layouts += [torch.tensor([[0] * n + [1] * (12 - n), [0] * 12]) for n in range(1, 11)]
    expected = [student(ids, ids, documents)[0].item() for documents in layouts]
    torch._dynamo.reset()
    counters.clear()
    compile_layers(decoder_layers(student), backend=counter)
    for documents, loss in zip(layouts, expected, strict=True):
        assert student(ids, ids, documents)[0].item() == pytest.approx(loss, rel=1e-6)
        counts.append((counter.frame_count, counters["frames"]["total"]))  # the latter: also of frames without a graph
    assert counts == [counts[0]] * len(layouts)
    assert all(count > 0 for count in counts[0])


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("starcoder2", {"attention_dropout": 0.5, "residual_dropout": 0.5, "embedding_dropout": 0.5}),
        ("phi", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5}),
        ("granite", {"attention_dropout": 0.5}),
        ("mpt", {"resid_pdrop": 0.5, "emb_pdrop": 0.5, "attn_config": {"alibi": True, "attn_pdrop": 1}}),
        ("llama", {"attention_dropout": 0.5}),
        ("mixtral", {"router_jitter_noise": 0.5, "attention_dropout": 0.5}),
        ("phimoe", {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5}),
    ],
)
def test_training_draws_no_noise(tmp_path, family, rates):
    """So the loss does not depend on the division of a step."""
    source = tiny.save(tiny.build(family), tmp_path / "model")
    tiny.edit_config(source, **rates)
    student = load_student(source).train()
    ids = torch.arange(24).view(2, 12)
    losses = [student(ids, labels_BT=ids)[0] for _ in range(2)]
    assert torch.equal(*losses)
    assert torch.equal(losses[0], student.eval()(ids, labels_BT=ids)[0])


TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA4 = {
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "expected"), [
    ("gemma4_text", GEMMA4, ("Gemma4TextDecoderLayer",)),  # the class names vision and audio layers too
    ("biogpt", {}, ()),  # its class names none
])  # fmt: skip
def test_names_of_layers_are_those_that_a_model_has(tmp_path, monkeypatch, model_type, changes, expected):
    config = transformers.AutoConfig.for_model(model_type, **TINY, **changes)
    config.save_pretrained(tmp_path)
    assert layer_class_names(tmp_path) == expected
    for compiled, recomputed, sharded in itertools.product((False, True), repeat=3):
        fails = (compiled or recomputed or sharded) and not expected
        settings = SimpleNamespace(compile=compiled, activation_checkpointing=recomputed)
        monkeypatch.setenv("ACCELERATE_USE_FSDP", str(sharded))
        message = f"layers of model_type '{model_type}', so .* cannot be used; leave (it|them) out"
        with pytest.raises(InputError, match=message) if fails else nullcontext():
            assert check_layer_names(tmp_path, settings) == expected
