"""Latent attention computes what the source does, in transformers' stock class, where its sizes permit."""

import json

import llama_pairs
import numpy as np
import pytest
import tiny
import torch
from damage import edit_tensors
from latent import config, divergence, logits, make_source, make_unfolded
from latent_reference import attend
from safetensors.torch import load_file
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from convert.latent.baselines import solve_as
from convert.latent.closed_form import LatentTarget, moments_from_norm, solve
from convert.latent.frequencies import SourceRope, folds, frequencies_at, rope_parameters, stock_pair_indices
from convert.latent.sizes import LatentSizes
from convert.latent.stock_tensors import StockNames, from_stock_tensors, to_stock_tensors
from convert.layer_tensors.head_matrices import HeadMatrices
from model.decoder.transformers_classes import cache_argument

LARGEST_DIFFERENCE, LARGEST_DIVERGENCE = 1e-4, 1e-10
BY_WEIGHTS = ("--calibration", "none")
GQA = ("--latent", 16, "--rope", 16, "--frequencies", "longrope")
OWN_SIZE = {
    "MQA": ({"num_key_value_heads": 1}, ("--latent", 8, "--rope", 8)),
    "MQA, bias": ({"num_key_value_heads": 1}, ("--latent", 9, "--rope", 8, "--latent-norm", "bias")),
    "MQA, epsilon of Llama 2": ({"num_key_value_heads": 1, "rms_norm_eps": 1e-5}, ("--latent", 8, "--rope", 8)),
    "GQA-2": ({"num_key_value_heads": 2}, GQA),
    "GQA-2, tied": ({"num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}, GQA),
    "GQA-2, bias": (
        {"num_key_value_heads": 2},
        ("--latent", 17, "--rope", 16, "--frequencies", "longrope", "--latent-norm", "bias"),
    ),
    "GQA-2, wider": ({"num_key_value_heads": 2}, ("--latent", 20, "--rope", 16, "--frequencies", "longrope")),
    "mistral": ({"family": "mistral", "num_key_value_heads": 1, "rms_norm_eps": 1e-5}, ("--latent", 8, "--rope", 8)),
    **{
        f"MQA, {kind}": ({"num_key_value_heads": 1, "rope_parameters": rope}, ("--latent", 8, "--rope", 8))
        for kind, rope in llama_pairs.ROPES.items()
        if kind in ("theta", "linear", "yarn", "yarn-tuned", "llama3")
    },
    "heads wider than the model": (
        {"head_dim": 16}, ("--latent", 64, "--rope", 128, "--frequencies", "longrope")
    ),
    "GQA-2, llama3": ({"num_key_value_heads": 2, "rope_parameters": llama_pairs.ROPES["llama3"]}, GQA[:4]),
}  # fmt: skip


@pytest.mark.parametrize("case", OWN_SIZE)
def test_latent_attention_of_the_sources_own_size(convert, tmp_path, case):
    changes, options = OWN_SIZE[case]
    source = make_source(tmp_path / "source", **changes)
    convert("mha-to-mla", source, tmp_path / "out", *options).succeeded()
    _check_equal(source, tmp_path / "out")
    convert("verify", source, tmp_path / "out").succeeded()


def test_round_off_is_not_made_into_weights(convert, tmp_path):
    """Where nothing is lost, no key is left for the latent, and the spare dimensions of the latent have no use."""
    source, out = make_source(tmp_path / "source", num_key_value_heads=2), tmp_path / "out"
    convert("mha-to-mla", source, out, "--latent", 20, "--rope", 16, "--frequencies", "longrope").succeeded()
    for name, tensor in tensors_of(out).items():
        if "kv_b_proj" in name:
            keys_HNL, values_HDL = tensor.view(8, 2, 8, 20).unbind(1)
            assert not keys_HNL.any()
            assert int(values_HDL.flatten(0, 1).any(dim=0).sum()) == 16
        if "q_proj" in name:  # as large as the source's, so that training can use the latent for keys
            parts_HQX = tensor.view(8, 24, 64)
            assert parts_HQX[:, :8].std() > 0.1 * parts_HQX[:, 8:].std()


@pytest.mark.parametrize("method", ["transmla", "care", "svd"])
@pytest.mark.parametrize("options", [(), ("--frequencies", "longrope")])
def test_methods_for_comparison_hold_scaled_frequencies(convert, tmp_path, method, options):
    """With one K/V head, they too compute what the source does."""
    changes = {"num_key_value_heads": 1, "rope_parameters": llama_pairs.ROPES["llama3"], "vocab_size": 300}
    source, out = make_tokenizer(make_source(tmp_path / "source", **changes), 300), tmp_path / "out"
    size = ("--latent", 8, "--rope", 8, "--calibration-tokens", 1024)
    convert("mha-to-mla", source, out, *size, "--method", method, *options).succeeded()
    assert config(out)["rope_parameters"]["rope_type"] == "longrope"
    _check_equal(source, out)
    convert("verify", source, out).succeeded()
    convert("mha-to-mla", source, tmp_path / "half", *size, "--rope", 4, "--method", method, *options).succeeded()


def test_the_svd_of_the_weights_needs_no_text(convert, tmp_path):
    source = make_tokenizer(make_source(tmp_path / "source", vocab_size=300), 300)
    options = ("--latent", 12, "--rope", 8, "--method", "svd")
    convert("mha-to-mla", source, tmp_path / "out", *options, *BY_WEIGHTS).succeeded()
    convert("mha-to-mla", source, tmp_path / "text", *options, "--calibration-tokens", 1024).succeeded()
    without, calibrated = (tensors_of(tmp_path / name) for name in ("out", "text"))
    assert without.keys() == calibrated.keys()
    for name, tensor in without.items():
        assert torch.equal(tensor, calibrated[name]), name
    convert("verify", source, tmp_path / "out").succeeded()


def test_methods_for_comparison_join_neighbouring_pairs():
    """Four channels for the 16 pairs of a head: the first has pairs 0 to 3, and the last 12 to 15."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 32, 64)) for _ in range(3))
    before = HeadMatrices(q, k, v, rng.standard_normal((2, 64, 32)), 16)
    sizes = LatentSizes(2, 2, 32, 64, kv_lora_rank=10, qk_rope_head_dim=8, norm="eps", frequencies="stock")
    rope = SourceRope(tuple(10000.0 ** (-p / 16) for p in range(16)), 1.0, 10000.0, True, 64)
    target = LatentTarget(sizes, rope, stock_pair_indices(4, 4))
    latent = solve_as("svd", before, moments_from_norm(np.ones(64)), target)
    sums = k.reshape(2, 2, 4, 4, 64).sum(axis=(0, 3))  # over heads, and the pairs of a channel
    assert np.allclose(latent.key_RX, sums.reshape(8, 64) / np.sqrt(8))


@pytest.mark.parametrize("norm", ["eps", "bias"])
def test_unfolded_latent_attention_is_found_again(convert, tmp_path, norm):
    rank = 6
    source = make_unfolded(tmp_path / "source", rank)
    size = ("--latent", rank + (norm == "bias"), "--rope", 8, "--latent-norm", norm)
    convert("mha-to-mla", source, tmp_path / "out", *size, *BY_WEIGHTS).succeeded()
    _check_equal(source, tmp_path / "out")
    smaller = ("--latent", 5, "--rope", 8, *BY_WEIGHTS)
    convert("mha-to-mla", source, tmp_path / "less", *smaller).succeeded()
    assert divergence(logits(source), logits(tmp_path / "less")) > 1e-5


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _check_equal(source, out):
    before, after = logits(source), logits(out)
    assert float(before.std()) > 0.3
    assert float((before - after).abs().max()) <= LARGEST_DIFFERENCE
    assert divergence(before, after) <= LARGEST_DIVERGENCE


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
@pytest.mark.parametrize("norm", ["eps", "bias"])
def test_bfloat16_is_as_near_to_the_parent_as_the_parent_in_bfloat16(convert, tmp_path, norm, epsilon):
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_key_value_heads": 1}
    source = make_source(tmp_path / "source", dtype="bfloat16", rms_norm_eps=epsilon, **sizes)
    size = ("--latent", 32 + (norm == "bias"), "--rope", 32, "--latent-norm", norm)
    convert("mha-to-mla", source, tmp_path / "out", *size).succeeded()
    exact = logits(source)
    own = divergence(exact, logits(source, torch.bfloat16))
    assert 0 < divergence(exact, logits(tmp_path / "out", torch.bfloat16)) <= 2 * own


def test_float16_with_a_bias(convert, tmp_path):
    source = make_source(tmp_path / "source", dtype="float16", num_key_value_heads=1)
    size = ("--latent", 9, "--rope", 8, "--latent-norm", "bias")
    convert("mha-to-mla", source, tmp_path / "out", *size).succeeded()
    exact = logits(source)
    own = divergence(exact, logits(source, torch.float16))
    assert divergence(exact, logits(tmp_path / "out", torch.float16)) <= 4 * own + 1e-6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
def test_float16_rounded_to_bfloat16(convert, tmp_path, epsilon, tied):
    """Every tensor is rounded once, as torch rounds it, and the record and the config say so."""
    changes = {"num_key_value_heads": 1, "rms_norm_eps": epsilon, "tie_word_embeddings": tied}
    source, out = make_source(tmp_path / "source", dtype="float16", **changes), tmp_path / "out"
    convert("mha-to-mla", source, out, "--latent", 8, "--rope", 8, "--dtype", "bfloat16").succeeded()
    before, after = (tensors_of(folder) for folder in (source, out))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert config(out)["dtype"] == "bfloat16"
    assert json.loads((out / "groupwise.json").read_text())["latent"]["dtype"] == "bfloat16"
    scaled = () if epsilon == 1e-6 else ("embed_tokens", "down_proj")
    kept = {"lm_head.weight": before["model.embed_tokens.weight"]} | {
        name: tensor for name, tensor in before.items() if "self_attn" not in name and not name.endswith(".inv_freq")
    }
    for name, tensor in kept.items():
        factor = (0.1**0.5 if name.split(".")[-2] in scaled else 1.0) if name != "lm_head.weight" else 1.0
        assert torch.equal(after[name], (tensor.double() * factor).bfloat16()), name
    own = divergence(logits(source), logits(source, torch.bfloat16))
    assert 0 < divergence(logits(source), logits(out, torch.bfloat16)) <= 4 * own
    convert("verify", source, out).succeeded()
    edit_tensors(out, lambda name, t: t + 0.01 if name == "model.layers.1.mlp.up_proj.weight" else t)
    result = convert("verify", source, out)
    assert (result.code, "up_proj.weight differs" in result.err) == (3, True), result.err


@pytest.fixture
def converted(convert, tmp_path):
    """Return a source and its conversion."""
    source = make_source(tmp_path / "source", num_key_value_heads=1, rms_norm_eps=1e-5)
    convert("mha-to-mla", source, tmp_path / "out", "--latent", 8, "--rope", 8).succeeded()
    return source, tmp_path / "out"


def test_a_latent_norm_without_its_weight_is_wrong(converted):
    source, out = converted
    edit_tensors(out, lambda name, t: torch.ones_like(t) if "kv_a_layernorm" in name else t)
    assert divergence(logits(source), logits(out)) > 1e-3


def test_another_epsilon_in_the_latent_norm_is_wrong(converted, monkeypatch):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    source, out = converted
    expected = logits(source)
    assert divergence(expected, logits(out)) <= LARGEST_DIVERGENCE
    monkeypatch.setattr(DeepseekV3RMSNorm.__init__, "__defaults__", (1e-5,))
    assert divergence(expected, logits(out)) > 1e-3


def test_another_epsilon_of_the_model_is_wrong(converted):
    """The config's epsilon is 1e-6, which engines that read it for the latent's norm need."""
    source, out = converted
    assert config(out)["rms_norm_eps"] == 1e-6
    tiny.edit_config(out, rms_norm_eps=1e-5)
    assert divergence(logits(source), logits(out)) > 1e-8


def test_stock_frequencies_do_not_hold_two_key_heads(convert, tmp_path):
    source = make_source(tmp_path / "source", num_key_value_heads=2)
    options = ("--frequencies", "stock", "--calibration", "none")
    convert("mha-to-mla", source, tmp_path / "out", *GQA[:4], *options).succeeded()
    assert divergence(logits(source), logits(tmp_path / "out")) > 1e-6
    assert config(tmp_path / "out")["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_cache_of_transformers_holds_the_latent_and_the_rotated_key(convert, tmp_path):
    from transformers import AutoModelForCausalLM

    source = make_source(tmp_path / "source")
    options = ("--latent", 12, "--rope", 4, *BY_WEIGHTS, "--json")
    report = json.loads(convert("mha-to-mla", source, tmp_path / "out", *options).out)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    cache = getattr(model(torch.arange(10)[None], use_cache=True), cache_argument(model))
    nbytes = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert nbytes == 10 * tiny.N_LAYERS * (12 + 4) * 4  # float32
    assert report["kv_cache_bytes_per_token"] == {"before": tiny.N_LAYERS * 2 * 64 * 2, "after": nbytes // 10 // 2}


ROPE = SourceRope(tuple(10000.0 ** (-p / 4) for p in range(4)), 1.0, 10000.0, True, 64)


def _random_attention(n_kv_heads):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 8, 32)) for n in (4, n_kv_heads, n_kv_heads))
    return HeadMatrices(q, k, v, rng.standard_normal((4, 32, 8)), 4)


def test_what_is_written_is_the_reference_of_float64(tmp_path):
    """The float64 reference of the latent attention equals the stock class with the folded tensors."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    sizes = LatentSizes(4, 4, 8, 32, kv_lora_rank=10, qk_rope_head_dim=4, norm="eps", frequencies="stock")
    pair_indices = stock_pair_indices(1.5, 2)
    latent = solve(_random_attention(4), moments_from_norm(np.ones(32)), LatentTarget(sizes, ROPE, pair_indices))
    names = StockNames("self_attn.", False)
    tensors = to_stock_tensors(latent, sizes, names, 1.0)
    rope = rope_parameters(ROPE, pair_indices)
    model_config = DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=10, q_lora_rank=None,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, rope_parameters=rope, attn_implementation="eager",
    )  # fmt: skip
    module = DeepseekV3Attention(model_config, 0).double()
    state = {name.removeprefix("self_attn."): torch.from_numpy(values) for name, values in tensors.items()}
    module.load_state_dict(state)
    x = np.random.default_rng(1).standard_normal((12, 32))
    inputs = torch.from_numpy(x)[None]
    embedding = DeepseekV3RotaryEmbedding(model_config)
    mask = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.inference_mode():
        actual = module(inputs, embedding(inputs, torch.arange(12)[None]), mask)[0][0].numpy()
    expected = attend(latent, x, frequencies_at(ROPE, pair_indices))
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()
    again = from_stock_tensors(tensors, sizes, names, 1.0)
    for name, values in vars(latent).items():
        assert np.allclose(getattr(again, name), values, rtol=1e-12), name


@pytest.mark.parametrize(
    ("pair_indices", "expected"),
    [
        ((0.0, 1.0, 2.0, 3.0), [((p,), (p,)) for p in range(4)]),
        ((0.0, 2.0), [((0, 1), (0,)), ((2, 3), (1,))]),
        ((0.0, 1.0), [((0,), (0,)), ((1,), (1,))]),
        ((0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5), [((p,), (2 * p, 2 * p + 1)) for p in range(4)]),
        ((0.0, 0.0, 2.0), [((0,), (0, 1)), ((2,), (2,))]),
    ],
)
def test_which_pairs_share_which_channels(pair_indices, expected):
    assert [(fold.pairs, fold.channels) for fold in folds(pair_indices, 4)] == expected


@pytest.mark.parametrize("pair_indices", [(0.0, 1.5, 3.0), (0.0, 0.0, 1.0, 2.5), (1.0,)])
def test_the_config_gives_the_frequencies(pair_indices):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    rope = rope_parameters(ROPE, pair_indices)
    embedding = DeepseekV3RotaryEmbedding(
        DeepseekV3Config(qk_rope_head_dim=2 * len(pair_indices), rope_parameters=rope)
    )
    expected = frequencies_at(ROPE, pair_indices)
    assert np.allclose(embedding.inv_freq.numpy(), expected, rtol=1e-6)
    assert np.allclose(expected, [10000.0 ** (-p / 4) for p in pair_indices])
    assert (rope["rope_type"] == "default") == (pair_indices == (0.0, 1.5, 3.0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_latent_attention_takes_the_dtype_of_its_tensors(convert, tmp_path, dtype):
    """float16 in config.json would let the latent's norm overflow."""
    parent = tiny.save(tiny.build(), tmp_path / "source", dtype)
    tiny.edit_config(parent, torch_dtype="float16", dtype=None)
    out = tmp_path / "out"
    sizes = ("--latent", 16, "--rope", 4, "--calibration", "none")
    convert("mha-to-mla", parent, out, *sizes).succeeded()
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    with torch.inference_mode():
        assert AutoModelForCausalLM.from_pretrained(out)(torch.arange(8)[None]).logits.isfinite().all()
