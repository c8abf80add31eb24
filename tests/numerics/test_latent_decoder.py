"""Our decoder computes latent attention as transformers' stock class does, caches the latent, trains and exports it."""

import latent
import pytest
import tiny
import torch
from damage import edit_tensors, rewrite
from transformers import AutoModelForCausalLM

from model import generate, load_model
from model.decoder.generation import decode, prefill
from model.decoder.kv_cache import KVCache

WAYS = {
    "eps": ("--latent", 12, "--rope", 8),
    "bias": ("--latent", 12, "--rope", 8, "--latent-norm", "bias"),
    "stock": ("--latent", 10, "--rope", 4, "--frequencies", "stock"),
    "longrope": ("--latent", 16, "--rope", 20),
}


@pytest.fixture(params=WAYS)
def folder(request, convert, tmp_path):
    source = latent.make_source(tmp_path / "source", rms_norm_eps=1e-5)
    convert("mha-to-mla", source, tmp_path / "out", *WAYS[request.param], "--calibration", "none").succeeded()
    return tmp_path / "out"


def test_logits_are_the_stock_class(folder):
    ours, ids = load_model(folder), torch.randint(0, 67, (2, 40))
    assert type(ours).__name__ == "LlamaForCausalLM"
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        assert (ours(ids) - expected).abs().max() <= 1e-5
    assert not any("kv_a_layernorm" in name for name, _ in ours.named_parameters())
    sizes = [float(layer.self_attn.kv_a_proj_with_mqa.weight.detach().std()) for layer in ours.model.layers]
    assert min(sizes) > 1e-3  # nothing is tiny


def test_packed_documents_are_separate(folder):
    ours = load_model(folder)
    ids = torch.randint(0, 67, (1, 30))
    documents = torch.tensor([[0] * 11 + [1] * 19])
    with torch.inference_mode():
        packed = ours(ids, documents_BT=documents)
        assert (packed[:, 11:] - ours(ids[:, 11:])).abs().max() <= 1e-5


def test_decoding_on_latents_equals_the_prompt_at_every_position(folder):
    ours, ids = load_model(folder), torch.randint(0, 67, (3, 30))
    cache = KVCache(ours.config, 3, 30, torch.float32, "cpu")
    prepacked, other_cache = load_model(folder), KVCache(ours.config, 3, 30, torch.float32, "cpu")
    prepacked.prepack()
    with torch.inference_mode():
        for model, filled in ((ours, cache), (prepacked, other_cache)):
            cached = [prefill(model, ids[:, :5], filled), prefill(model, ids[:, 5:9], filled)]
            cached += [decode(model, ids[:, i], filled) for i in range(9, 30)]
            for length, logits in zip([5, *range(9, 31)], cached, strict=True):
                assert (logits - ours(ids[:, :length])[:, -1]).abs().max() <= 1e-5, length
    shape = ours.config.latent
    assert cache.nbytes == tiny.N_LAYERS * 3 * 30 * (shape.latent_dim + shape.qk_rope_head_dim) * 4


def test_generation_is_greedy_as_transformers(folder):
    prompts = [[5, 9, 3, 33], [60, 2], [7]]
    hf_model = AutoModelForCausalLM.from_pretrained(folder)
    ours = generate(load_model(folder), prompts, 12, stop_ids=[])
    for prompt, out in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        expected = hf_model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert out == expected[0, len(prompt) :].tolist()


def test_a_norm_that_is_not_undone_is_refused(convert, folder):
    from model.common.errors import CheckpointError

    edit_tensors(folder, lambda name, t: torch.ones_like(t) if "1.self_attn.kv_a_layernorm" in name else t)
    with pytest.raises(CheckpointError, match=r"layers\.1.*the norm of the latent is not undone"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("1.self_attn.o_proj.bias", lambda t: t + 0.5),
        ("1.self_attn.o_proj.bias", lambda t: t.sum()),
        ("1.self_attn.o_proj.bias", lambda t: t.long()),
        ("1.self_attn.kv_a_proj_with_mqa.bias", lambda t: t + torch.eye(len(t))[0]),
        ("1.self_attn.kv_a_proj_with_mqa.bias", lambda t: t.sum()),
        ("1.self_attn.kv_a_proj_with_mqa.weight", lambda t: t + torch.eye(len(t))[11][:, None]),
        ("1.self_attn.kv_b_proj.weight", lambda t: t + torch.eye(t.shape[1])[11]),
    ],
)  # fmt: skip
def test_what_other_programs_have_trained_is_not_dropped(convert, tmp_path, name, change):
    """Attention biases and the constant channel, which our decoder leaves out."""
    from model.common.errors import CheckpointError

    source = latent.make_source(tmp_path / "source", rms_norm_eps=1e-5)
    folder = tmp_path / "out"
    convert("mha-to-mla", source, folder, *WAYS["bias"], "--calibration", "none").succeeded()
    load_model(folder)
    edit_tensors(folder, lambda each, t: change(t) if each.endswith(name) else t)
    with pytest.raises(CheckpointError, match=rf"{name}.*the norm of the latent is not undone"):
        load_model(folder)


def test_biases_that_the_conversion_does_not_write_are_refused(convert, tmp_path):
    from model.common.errors import CheckpointError

    source, folder = latent.make_source(tmp_path / "source"), tmp_path / "out"
    convert("mha-to-mla", source, folder, *WAYS["eps"], "--calibration", "none").succeeded()
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.bias"):
        load_model(folder)


@pytest.mark.parametrize("key", ["first_k_dense_replace", "q_lora_rank", "rope_interleave", "tie_word_embeddings"])
def test_other_settings_of_the_class_are_refused(folder, key):
    from model.common.errors import CheckpointError

    values = {"first_k_dense_replace": 1, "q_lora_rank": 8, "rope_interleave": False, "tie_word_embeddings": True}
    tiny.edit_config(folder, **{key: values[key]})
    with pytest.raises(CheckpointError, match=key):
        load_model(folder)


def test_the_stock_class_opens_other_latent_attention(folder):
    """Without the entry in config.json it is not known that the norm is undone, and transformers computes it."""
    tiny.edit_config(folder, groupwise_latent_norm=...)
    ids = torch.randint(0, 67, (2, 10))
    with torch.inference_mode():
        model = load_model(folder)
        assert type(model).__name__ == "TransformersModel"
        assert (model(ids) - AutoModelForCausalLM.from_pretrained(folder)(ids).logits).abs().max() == 0
