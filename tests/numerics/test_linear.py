"""Prepacked weights: as exact as torch's own products, and the same model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from llama_pairs import pair, random_ids

from model import generate
from model.decoder import linear
from model.decoder.generation import prefill
from model.decoder.kv_cache import KVCache
from model.decoder.linear import PrepackedLinear, can_prepack

needs_prepacking = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def error(y, x, weight):
    """Return the root-mean-square error of y, relative to x · weightᵀ in float64."""
    exact = x.double() @ weight.double().T
    return ((y.double() - exact).square().mean() / exact.square().mean()).sqrt()


@needs_prepacking
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 1024), (2752, 1024), (96, 32)])
@pytest.mark.parametrize("rows", [(1, 1), (8, 1), (2, 100)])
@torch.inference_mode()
def test_as_exact_as_the_products_of_torch(rows, shape, dtype):
    if not can_prepack(torch.ones(1, dtype=dtype)):
        pytest.skip(f"this processor has no products of {dtype}")
    torch.manual_seed(0)
    weight, x, bias = torch.randn(shape).to(dtype), torch.randn(*rows, shape[1]).to(dtype), torch.randn(shape[0])
    out = PrepackedLinear(weight, None)(x)
    assert (out.shape, out.dtype) == ((*rows, shape[0]), dtype)
    assert error(out, x, weight) <= (1e-6 if dtype == torch.float32 else 4e-3)
    with_bias = PrepackedLinear(weight, bias.to(dtype))(x)
    torch.testing.assert_close(
        with_bias, F.linear(x, weight, bias.to(dtype)), atol=1e-4 if dtype == torch.float32 else 0.5, rtol=0.02
    )


FAMILIES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {}),
]


@needs_prepacking
@pytest.mark.parametrize(("family", "layout"), FAMILIES)
def test_a_prepacked_model_is_the_same_model(tmp_path, family, layout):
    _, ours = pair(tmp_path, family, num_key_value_heads=2, **layout)
    ids, prepacked = random_ids(2, 20), copy.deepcopy(ours)
    prepacked.prepack()
    prepacked.prepack()  # does nothing more
    assert all(isinstance(layer.mlp.up_proj, PrepackedLinear) for layer in prepacked.model.layers)
    assert not [name for name, _ in prepacked.named_parameters() if "proj" in name or "lm_head" in name]
    with torch.inference_mode():
        assert (prepacked(ids) - ours(ids)).abs().max() <= 1e-5
        logits = [prefill(model, ids, KVCache(ours.config, 2, 20, torch.float32, "cpu")) for model in (ours, prepacked)]
        assert (logits[0] - logits[1]).abs().max() <= 1e-5
    prompts = [row.tolist() for row in ids]
    assert generate(prepacked, prompts, 30) == generate(ours, prompts, 30)


@needs_prepacking
def test_a_prepacked_model_only_generates(tmp_path):
    """Whatever else it cannot do raises an error."""
    _, ours = pair(tmp_path)
    ids = random_ids(1, 8)
    ours.prepack()
    for impossible, words in (
        (lambda: ours(ids, ids), "computes no losses"),
        (lambda: ours(ids).sum().backward(), "does not require grad"),
        (ours.state_dict, "cannot be saved"),
        (lambda: ours.to(torch.bfloat16), "cannot be moved or cast"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words):
            impossible()


def test_where_torch_cannot_prepack_the_model_stays(tmp_path, monkeypatch):
    _, ours = pair(tmp_path)
    monkeypatch.setattr(linear.torch.backends.mkldnn, "is_available", lambda: False)
    ours.prepack()
    assert ours.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert not [module for module in ours.modules() if isinstance(module, PrepackedLinear)]
    assert not can_prepack(torch.ones(1, device="meta"))


@needs_prepacking
def test_where_the_operators_cannot_run_the_model_stays(tmp_path, monkeypatch):
    """As on a processor whose oneDNN has no such layout."""
    _, ours = pair(tmp_path, "llama")

    def fails(self, x):
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(PrepackedLinear, "forward", fails)
    ours.prepack()
    assert not any(isinstance(module, PrepackedLinear) for module in ours.modules())
    assert not can_prepack(torch.ones(1))
