"""The fingerprints of models: two that differ anywhere are told apart, though not every byte is read."""

import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from uptrain.runs import fingerprints
from uptrain.runs.fingerprints import model_sha256


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a model of whose file the pieces read its beginning and its end alone, as of a large one the most."""
    monkeypatch.setattr(fingerprints, "N_PIECES", 2)
    monkeypatch.setattr(fingerprints, "PIECE_BYTES", 64)
    return tiny.save(tiny.build(), tmp_path / "model")


def test_a_copy_is_the_same(folder, tmp_path):
    assert model_sha256(shutil.copytree(folder, tmp_path / "copy")) == model_sha256(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"])
def test_one_tensor_that_was_trained_differs(folder, tmp_path, name):
    """As after two runs of `--trainable kv` from one model: names, sizes and all other tensors are the same."""
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[name] += 1e-3 * torch.randn_like(tensors[name])
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert model_sha256(other) != model_sha256(folder)
