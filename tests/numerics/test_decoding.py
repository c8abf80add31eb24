"""Decoding with the Llama code: with and without a KV cache, in batches, greedily and by sampling."""

import itertools
import json
import re

import pytest
import tiny
import torch
from llama_pairs import ROPES, pair, random_ids
from tiny_tokenizers import make_tokenizer
from transformers import DynamicCache

from model import generate, load_model
from model.common.errors import CheckpointError, InputError
from model.decoder import generation, kv_cache
from model.decoder.generation import decode, pad_left, prefill
from model.decoder.kv_cache import KVCache
from model.decoder.transformers_classes import cache_argument


@pytest.mark.parametrize("rope", ["default", "dynamic", "llama3"])
@pytest.mark.parametrize(("family", "layout"), [("llama", {}), ("mistral", {"sliding_window": 7}), ("qwen2", {})])
@pytest.mark.parametrize("n_kv_heads", [8, 2, 1])
def test_cached_decoding_equals_uncached_at_every_position(tmp_path, family, layout, n_kv_heads, rope):
    _, ours = pair(tmp_path, family, num_key_value_heads=n_kv_heads, rope_parameters=ROPES[rope], **layout)
    ids = random_ids(3, 45)
    cache = KVCache(ours.config, 3, 45, torch.float32, "cpu")
    with torch.inference_mode():
        cached = [prefill(ours, ids[:, :5], cache)]
        cached += [prefill(ours, ids[:, 5:9], cache)]
        cached += [decode(ours, ids[:, i], cache) for i in range(9, 45)]
        for length, logits in zip([5, *range(9, 46)], cached, strict=True):
            if rope == "dynamic" and length > 32:
                break  # from here on, every new token changes all angles: see the next test
            assert (logits - ours(ids[:, :length])[:, -1]).abs().max() <= 1e-5, length
    assert cache.length == 45
    assert cache.nbytes == 2 * 2 * 3 * 45 * n_kv_heads * ours.config.head_dim * 4


@pytest.mark.parametrize("layout", [{}, {"sliding_window": 7}])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_a_cache_that_grows_gives_what_one_of_full_size_gives(tmp_path, monkeypatch, layout, padded, dtype, tolerance):
    """Room that is not used yet counts for nothing, at any length."""
    _, ours = pair(tmp_path, "mistral", num_key_value_heads=2, **layout)
    ours.to(dtype)
    ids, padding = random_ids(2, 40), torch.tensor([0, 3]) if padded else None
    logits, bytes_held = [], []
    for least in (40, 1):
        monkeypatch.setattr(kv_cache, "_MIN_ROOM", least)
        cache = KVCache(ours.config, 2, 40, dtype, "cpu", padding)
        logits.append([prefill(ours, ids[:, :5], cache), *(decode(ours, ids[:, i], cache) for i in range(5, 30))])
        bytes_held.append(cache.nbytes)
    for full, grown in zip(*logits, strict=True):
        assert (full - grown).abs().max() <= tolerance
    per_token = 2 * 2 * 2 * 2 * ours.config.head_dim * dtype.itemsize
    assert bytes_held[0] == 40 * per_token and 30 * per_token <= bytes_held[1] <= 34 * per_token
    with torch.no_grad():  # it grew in inference mode
        ours(ids[:, :8], cache=cache)
    with pytest.raises(ValueError, match="the text grows to 41 tokens, but the cache holds 40"):
        prefill(ours, ids[:, :3], cache)


@pytest.mark.parametrize("rope", ROPES)
def test_cached_decoding_equals_transformers_beyond_the_original_context(tmp_path, rope):
    hf_model, ours = pair(tmp_path, num_key_value_heads=4, rope_parameters=ROPES[rope])
    ids, their_cache = random_ids(2, 45), DynamicCache(config=hf_model.config)
    our_cache = KVCache(ours.config, 2, 45, torch.float32, "cpu")
    with torch.inference_mode():
        for start, stop in ((0, 20), *((i, i + 1) for i in range(20, 45))):
            expected = hf_model(ids[:, start:stop], **{cache_argument(hf_model): their_cache}).logits[:, -1]
            assert (prefill(ours, ids[:, start:stop], our_cache) - expected).abs().max() <= 1e-5, stop


@pytest.mark.parametrize("rope", ["default", "dynamic"])
@pytest.mark.parametrize("window", [None, 7])
def test_left_padded_batches_equal_single_prompts(tmp_path, window, rope):
    layout = {"sliding_window": window, "rope_parameters": ROPES[rope], "max_position_embeddings": 64}
    _, ours = pair(tmp_path, "mistral", num_key_value_heads=2, **layout)
    prompts = [random_ids(n, seed=n).tolist() for n in (3, 11, 1, 20)]
    ids, padding = pad_left(prompts)
    assert padding.tolist() == [17, 9, 19, 0]
    cache = KVCache(ours.config, 4, 24, torch.float32, "cpu", padding)
    batched = [prefill(ours, ids, cache)]
    new = random_ids(4, 3)
    batched += [decode(ours, new[:, i], cache) for i in range(3)]
    for row, prompt in enumerate(prompts):
        for step, logits in enumerate(batched):
            alone = ours(torch.tensor([prompt + new[row, :step].tolist()]))[0, -1]
            assert (logits[row] - alone).abs().max() <= 1e-5
    together = generate(ours, prompts, 12)
    assert together == [generate(ours, [prompt], 12)[0] for prompt in prompts]


def test_greedy_text_is_transformers(tmp_path):
    hf_model, ours = pair(tmp_path, num_key_value_heads=2, max_position_embeddings=128)
    prompt = random_ids(1, 9)
    hf_model.generation_config.eos_token_id = None
    expected = hf_model.generate(prompt, max_new_tokens=64, do_sample=False, use_cache=True)[0, 9:].tolist()
    assert generate(ours, prompt.tolist(), 64) == [expected]


def test_sampling_is_seeded_and_keeps_to_the_nucleus(tmp_path):
    _, ours = pair(tmp_path)
    prompt = [[1, 2, 3]]
    a, b, c = (generate(ours, prompt, 30, temperature=1.5, seed=seed) for seed in (1, 1, 2))
    assert a == b != c
    assert generate(ours, prompt, 30, temperature=1.5, top_p=1e-9, seed=5) == generate(ours, prompt, 30)
    free = generate(ours, prompt, 30)[0]
    assert generate(ours, prompt, 30, stop_ids=[free[7]])[0] == list(itertools.takewhile(lambda t: t != free[7], free))


@pytest.mark.parametrize("extreme", [{"temperature": 1e-300}, {"temperature": 1e-45}, {"temperature": 1e-38},
    {"temperature": 1.0, "top_p": 1e-300}])  # fmt: skip
def test_extreme_values_are_greedy(tmp_path, extreme):
    """In float32 they are 0, or divide to infinity."""
    _, ours = pair(tmp_path)
    prompt = random_ids(1, 5).tolist()
    assert generate(ours, prompt, 10, **extreme) == generate(ours, prompt, 10)


def test_sampling_follows_the_distribution():
    from model.decoder.generation import sample

    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = p.log().expand(20000, 4)
    drawn = sample(logits, 1.0, 1.0, torch.Generator().manual_seed(0)).bincount(minlength=4) / 20000
    assert (drawn - p).abs().max() < 0.015
    drawn = sample(logits, 1.0, 0.75, torch.Generator().manual_seed(0)).bincount(minlength=4) / 20000
    assert (drawn - torch.tensor([0.625, 0.375, 0, 0])).abs().max() < 0.015


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("several", [False, True])
def test_texts_end_where_transformers_ends_them(tmp_path, where, several):
    from transformers import AutoModelForCausalLM

    folder, prompts = tiny.save(tiny.build(), tmp_path / "model"), [[1, 2, 3], [4, 5, 6]]
    free = [generate(load_model(folder), [prompt], 24, stop_ids=())[0] for prompt in prompts]
    ends = [free[0][7], free[1][3]] if several else free[0][7]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends} if where[0] == "g" else {}))
    tiny.edit_config(folder, eos_token_id=ends if where[0] == "c" else None, pad_token_id=0)
    ours = load_model(folder)
    known = ends if several else [ends]
    generated = generate(ours, prompts, 24)
    assert generated == [list(itertools.takewhile(lambda token: token not in known, text)) for text in free]
    assert any(len(text) < 24 for text in generated)
    if where[0] == "c":  # as transformers takes it where there is no generation_config.json
        (folder / "generation_config.json").unlink()
    hf_model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, text in zip(prompts, generated, strict=True):
        ids = torch.tensor([prompt])
        written = hf_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert [token for token in written[0, 3:].tolist() if token not in known] == text
    assert generate(ours, prompts, 24, stop_ids=()) == free


def test_prompts_as_tensors_and_arrays(tmp_path):
    _, ours = pair(tmp_path)
    expected = generate(ours, [[1, 2, 3]], 4)
    ids = torch.tensor([[1, 2, 3]])
    for prompts in (ids, ids.numpy(), list(ids), list(ids.numpy())):
        assert generate(ours, prompts, 4) == expected


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([1, 2, 3], {}, "must be a list of prompts"), ([], {}, "a prompt has no tokens"),
        ([[1], []], {}, "a prompt has no tokens"), ([[1, 67]], {}, "hold the id 67; the model's vocabulary"),
        ([[-1]], {}, "hold the id -1"), ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([[1]], {"temperature": -1.0}, "temperature = -1.0"), ([[1]], {"top_p": 5.0}, "top_p = 5.0"),
        ([[1]], {"temperature": float("nan")}, "temperature = nan"), ([[1]], {"top_p": 0.0}, "top_p = 0.0"),
    ],
)  # fmt: skip
def test_impossible_arguments(tmp_path, prompts, options, words):
    _, ours = pair(tmp_path)
    with pytest.raises(InputError, match=re.escape(words)):
        generate(ours, prompts, **{"max_new_tokens": 4, **options})


def test_a_prompt_of_another_tokenizer(tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=67), tmp_path / "model"), 300)
    with pytest.raises(CheckpointError, match="but the model has a vocabulary of 67; they do not belong together"):
        generation.show(folder, "~ z", 4, 0.0, 1.0, 0, "cpu")
