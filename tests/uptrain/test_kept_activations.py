"""What transformers' classes keep for the backward pass: as estimated, and without a mask for each layer."""

from dataclasses import replace

import latent
import pytest
import tiny
import torch

from model.decoder.transformers_model import TransformersModel
from uptrain.estimates.memory import MemoryEstimator, MemoryOptions
from uptrain.models.load import load_student

SIZES = {
    "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 67, "max_position_embeddings": 256,
}  # fmt: skip
SEQ_LEN = 128


def save(family, folder, n_layers=6):
    """Save a model; the formula for Llama leaves out what is outside layers, so it has many."""
    n_layers *= 4 if family == "llama" else 1
    changes = {**SIZES, "num_hidden_layers": n_layers, "sliding_window": 256}
    if family in ("llama", "gemma", "olmo2", "granite"):
        del changes["sliding_window"]
    return tiny.save(tiny.build(family, **changes), folder, "bfloat16")


def saved_tensors(student, n_windows, n_documents=1):
    """Return what autograd saves up to the logits of windows of some documents, in bfloat16, and the logits."""
    saved = []
    ids = torch.randint(5, 60, (n_windows, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(SEQ_LEN) * n_documents // SEQ_LEN).expand(n_windows, -1)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        logits = student(ids, None, documents)
    return saved, logits


def saved_bytes(student, n_windows):
    """Return the bytes that autograd saves of two windows; weights and their casts do not depend on the number."""

    def total(n):
        storages = [tensor.untyped_storage() for tensor in saved_tensors(student, n)[0]]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return total(2 * n_windows) - total(n_windows)


FAMILIES = ("llama", "qwen3", "olmo2", "gemma", "phi3", "granite", "smollm3", "gemma2", "gemma3_text")


@pytest.mark.parametrize(
    ("family", "part"),
    [
        *((family, "all") for family in FAMILIES),
        ("qwen3", "attention"),
        ("qwen3", "lora"),
        ("gemma2", "attention"),
        ("qwen3_moe", "attention"),
    ],
)
def test_activations_are_what_autograd_saves(tmp_path, family, part):
    """The own decoder's formula leaves out a few percent, as docs/training.md says."""
    folder = save(family, tmp_path / "model")
    student = load_student(folder, part, 4).train()
    estimator = MemoryEstimator.read(folder, None, SEQ_LEN, lora_rank=4)
    assert estimator.activation_warning(part) is None
    estimated = estimator.memory(MemoryOptions(part, 2)).activations
    measured = saved_bytes(student, 2)
    assert 0.95 * measured <= estimated or family == "llama"
    assert measured == pytest.approx(estimated, rel=0.08)


@pytest.mark.parametrize("part", ["all", "attention", "kv", "lora"])
@pytest.mark.parametrize("n_kv_heads", [8, 2, 1])
def test_activations_of_llama_without_flash_attention(tmp_path, n_kv_heads, part):
    """Attention copies each K/V head for its query heads, and keeps the copies."""
    changes = {**SIZES, "num_key_value_heads": n_kv_heads, "num_hidden_layers": 24}
    folder = tiny.save(tiny.build("llama", **changes), tmp_path / "model", "bfloat16")
    estimator = replace(MemoryEstimator.read(folder, None, SEQ_LEN, lora_rank=4), repeats_kv=True)
    estimated = estimator.memory(MemoryOptions(part, 2)).activations
    assert saved_bytes(load_student(folder, part, 4).train(), 2) == pytest.approx(estimated, rel=0.02)


@pytest.mark.parametrize("part", ["all", "attention", "kv", "lora"])
def test_activations_of_latent_attention(tmp_path, convert, part):
    source = latent.make_source(tmp_path / "source", num_hidden_layers=24, vocab_size=67)
    sizes = ("--latent", 24, "--rope", 8, "--calibration", "none", "--dtype", "bfloat16")
    convert("mha-to-mla", source, tmp_path / "model", *sizes).succeeded()
    estimator = MemoryEstimator.read(tmp_path / "model", None, SEQ_LEN, lora_rank=4)
    estimated = estimator.memory(MemoryOptions(part, 2)).activations
    assert saved_bytes(load_student(tmp_path / "model", part, 4).train(), 2) == pytest.approx(estimated, rel=0.02)


def test_recomputing_keeps_the_mask_and_one_layer(tmp_path):
    folder = save("qwen3", tmp_path / "model")
    estimator = MemoryEstimator.read(folder, None, SEQ_LEN)
    kept = estimator.measure_kept("all")
    states = 6 * SEQ_LEN * 4 * SIZES["hidden_size"]
    assert kept.outside > 2 * SEQ_LEN**2
    again = estimator.memory(MemoryOptions("all", 3, activation_checkpointing=True)).activations
    assert again == pytest.approx(3 * (states + kept.layer + kept.outside), abs=3)


def test_a_class_that_cannot_be_measured_is_warned_of(tmp_path, uptrain, monkeypatch):
    from uptrain.models import kept_activations

    def fail(*_):
        raise RuntimeError("no fake tensors here")

    folder = save("qwen3", tmp_path / "model", 2)
    monkeypatch.setattr(kept_activations, "_saved_bytes", fail)
    warning = MemoryEstimator.read(folder, None, SEQ_LEN).activation_warning("all")
    assert "estimated as Llama's" in warning and "no fake tensors here" in warning
    plan = ("plan", folder, "--steps", 2, "--global-batch-tokens", 256, "--lr", 1e-3, "--seq-len", SEQ_LEN)
    result = uptrain(*plan)
    assert result.code == 0 and "training may take far more memory" in result.err


@pytest.mark.parametrize(("family", "dtype", "n_masks"), [("qwen3", torch.bfloat16, 1), ("gemma2", torch.float32, 0)])
def test_layers_share_one_mask(tmp_path, monkeypatch, family, dtype, n_masks):
    """With torch's attention each layer saves the same tensor. A class that adds the mask itself saves none."""
    student = load_student(save(family, tmp_path / "model", 3), "all")
    saved, logits = saved_tensors(student, 1, 2)
    assert student._mask_dtype("cpu") == torch.float32, "without autocast it is the parameters' dtype"
    masks = {
        x.untyped_storage().data_ptr(): x.dtype for x in saved if x.shape[-2:] == (SEQ_LEN,) * 2 and x.shape[1] == 1
    }
    assert list(masks.values()) == [dtype] * n_masks
    logits.sum().backward()
    gradients = [parameter.grad.clone() for parameter in student.parameters()]
    student.zero_grad()
    monkeypatch.setattr(TransformersModel, "_mask_dtype", lambda *_: torch.float32)
    expected = saved_tensors(student, 1, 2)[1]
    expected.sum().backward()
    assert torch.equal(logits, expected)
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in student.parameters())))
