"""`uptrain run --init`: models of all families from random weights."""

import json

import pytest
import real_runs
import tiny
import torch
from transformers import AutoModelForCausalLM

from model.decoder.loading import load_model

FAMILIES = {
    "gemma2": {"sliding_window": 32},
    "glm": {},
    "gpt_neox": {"tie_word_embeddings": True, "architectures": ["GPTNeoXForCausalLM"]},
    "olmo2": {},
    "phi": {},
    "qwen3": {},
    "smollm3": {},
}


@pytest.fixture
def begin(uptrain, inputs, tmp_path):
    """Start a run of a family from a folder that holds nothing but a config.json."""

    def run(family, out, *options, **changes):
        folder = tmp_path / family
        tiny.make_config(family, vocab_size=real_runs.VOCAB, **changes).save_pretrained(folder)
        fixed = ("--data", inputs["data"], "--steps", 1, "--lr", 1e-8, "--global-batch-tokens", 256)
        return uptrain("run", "--init", folder, *fixed, "--out", tmp_path / out, *options)

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_begins_with_the_weights_of_its_class(uptrain, convert, begin, tmp_path, family):
    """The seed alone decides them; transformers opens the result, all of it, with the same logits; it can be merged."""
    for out, seed in (("first", 1), ("again", 1), ("other", 2)):
        begin(family, out, "--seed", seed, **FAMILIES[family]).succeeded()
        uptrain("export", tmp_path / out, tmp_path / f"{out}-hf", "--dtype", "float32").succeeded()
    first, again, other = (tiny.tensors(tmp_path / f"{out}-hf") for out in ("first", "again", "other"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())
    embedding = next(tensor for name, tensor in first.items() if "embed" in name)
    assert 0.015 < float(embedding.std()) < 0.025
    opened, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "first-hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        ours = load_model(tmp_path / "first-hf", torch.float32)(ids)
        torch.testing.assert_close(ours, opened(ids).logits, atol=1e-5, rtol=0)
    assert ("lm_head.weight" in first) == (not opened.config.tie_word_embeddings)
    record = json.loads((tmp_path / "first-hf/uptraining.json").read_text())
    assert record["settings"]["model"] == ""
    convert("mha-to-gqa", tmp_path / "first-hf", tmp_path / "merged", "--groups", 2, "--method", "mean").succeeded()
    load_model(tmp_path / "merged")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mpt", {}, "counts distances (ALiBi) across the documents of a window"),
        (
            "mpt",
            {"attn_config": {"alibi": False}},
            "attn_config.alibi = False, which transformers' class of mpt ignores",
        ),
        ("mpt", {"logit_scale": 0.25}, "logit_scale = 0.25, which transformers' class of mpt ignores"),
        ("mixtral", {}, "under other names than the files do"),
        ("gpt_neox", {}, "under other names than the files do (lm_head.weight)"),
        ("phi3", tiny.LONGROPE, "use windows of 16 tokens at most (--seq-len 16)"),
        ("t5", {}, "is an encoder-decoder"),
        ("rwkv", {"context_length": 64}, "packed documents are not separate"),
        ("phi3", {"sliding_window": 0}, "sliding_window = 0; it must be a positive whole number"),
        ("doge", {"keep_window_size": 8}, "in more than 8 tokens, it chooses those to attend to among all documents"),
        ("roberta", {"is_decoder": True, "pad_token_id": 1}, "the positions of a text do not begin at 0"),
        ("qwen3", {"num_key_value_heads": 3, "num_attention_heads": 7}, "= 3, which does not divide 7 query heads"),
    ],
)
def test_what_cannot_be_trained_is_refused(begin, tmp_path, family, changes, words):
    begin(family, "run", **changes).refused(words)
    assert not (tmp_path / "run").exists()
