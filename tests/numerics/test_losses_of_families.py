"""Losses of families that transformers computes, whose logits are more than a product: scaled, capped or biased."""

import json

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch_files import write_dcp

from model import load_model
from model.common.errors import CheckpointError
from uptrain.data.batch import Batch
from uptrain.training.losses import find_loss

FAMILIES = {
    "granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.0625}, "phi": {}, "nanochat": {}, "olmo2": {},
}  # fmt: skip


def logits(model, batch):
    """Of the tokens that count, row by row, without packing."""
    raw = model.hf_model(batch.ids_BT, use_cache=False).logits.double()[:, :-1]
    return raw[batch.labels_BT[:, 1:] >= 0]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["flash_attention_2", "flex_attention"])
def test_how_config_json_wants_attention_computed_does_not_matter(tmp_path, key, value):
    """What it names may be missing here, and may not take the masks of packed documents."""
    folder = tiny.save(tiny.build("qwen3"), tmp_path / "model")
    ids, documents = torch.arange(12)[None], torch.tensor([[0] * 5 + [1] * 7])
    with torch.inference_mode():
        expected = load_model(folder)(ids, documents_BT=documents)
        tiny.edit_config(folder, **{key: value})
        assert torch.equal(load_model(folder)(ids, documents_BT=documents), expected)


def test_a_model_in_the_hubs_cache_is_opened_by_its_name(tmp_path, monkeypatch):
    snapshot = tmp_path / "cache/models--org--model/snapshots" / ("a" * 40)
    tiny.save(tiny.build("qwen3"), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(load_model("org/model")(ids), load_model(snapshot)(ids))


def test_formats_that_transformers_does_not_read_are_refused(tmp_path):
    model = tiny.build("qwen3")
    folder = write_dcp(tmp_path / "model", dict(model.state_dict()))
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    with pytest.raises(CheckpointError, match=r"model_type 'qwen3' as Hugging Face folders only.*convert to-hf"):
        load_model(folder)


@pytest.fixture(params=FAMILIES)
def models(request, tmp_path):
    folders = [
        tiny.save(
            tiny.build(request.param, seed, initializer_range=0.2, **FAMILIES[request.param]), tmp_path / str(seed)
        )
        for seed in (0, 1)
    ]
    return [load_model(folder, torch.float32) for folder in folders]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (2, 12), generator=generator)
    labels = ids.clone()
    labels[0, 5:] = -100
    return Batch(ids, labels, torch.zeros_like(ids))


@pytest.mark.parametrize("name", ["next-token", "distill", "mix"])
def test_value_and_gradients(models, batch, name):
    student, teacher = models
    with torch.no_grad():
        q = logits(teacher, batch).log_softmax(1)
    p = logits(student, batch).log_softmax(1)
    targets = batch.labels_BT[:, 1:][batch.labels_BT[:, 1:] >= 0]
    next_token, kl = F.nll_loss(p, targets, reduction="sum"), (q.exp() * (q - p)).sum()
    wanted = {"next-token": next_token, "distill": kl, "mix": (next_token + kl) / 2}[name]
    wanted.backward()
    expected = {key: parameter.grad for key, parameter in student.named_parameters()}
    student.zero_grad(set_to_none=True)
    loss = find_loss(name)(student, teacher, batch)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-5)
    assert all(gradient is not None for gradient in expected.values()), "a run of it could not be resumed"
    for key, parameter in student.named_parameters():
        assert (parameter.grad - expected[key]).norm() <= 1e-4 * expected[key].norm() + 1e-6, key
    assert all(parameter.grad is None for parameter in teacher.parameters())
