"""vLLM accepts what we write, divides its K/V heads as `inspect` says, and computes from it what transformers does."""

import json
from pathlib import Path

import interop
import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma")
RUN = ("llama 8", "llama 4", "llama 2", "llama 1")
SIZES = (1, 2, 4, 8)
N_NEW = 20
# vLLM's attention takes heads of 32 values and more.
SIZE = {**interop.WIDE, "hidden_size": 256, "head_dim": 32}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    environment = interop.need("vllm")
    place = tmp_path_factory.mktemp("vllm")
    tokenizer, folders, said = interop.make_tokenizer(place / "tokenizer"), {}, {}
    for family in FAMILIES:
        source = interop.make_source(place / family / "source", family, tokenizer, **SIZE)
        for row in json.loads(interop.call("inspect", source, "--json"))["groups"]:
            said[f"{family} {row['groups']}"] = row
        for groups, out in interop.convert_to_all(source, place / family).items():
            folders[f"{family} {groups}"] = out
    (prompt,) = interop.token_ids(1, vocab_size=256)
    request = {"folders": folders, "sizes": SIZES, "run": RUN, "prompt": prompt, "n_new": N_NEW}
    answer, logprobs = interop.ask(environment, "vllm_logits", place / "asked", **request)
    return folders, said, answer, logprobs, prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_sizes(answered, family):
    """A size that `inspect` calls split divides the heads; one that it calls replicated leaves one head, copied."""
    _, said, answer, _, _ = answered
    for groups in (8, 4, 2, 1):
        row, heads = said[f"{family} {groups}"], answer["heads"][f"{family} {groups}"]
        assert (heads["total"], heads["head_size"]) == (groups, 32)
        for size in SIZES:
            expected = {
                size in row["tensor_parallel_split"]: groups // size,
                size in row["tensor_parallel_replicated"]: 1,
            }.get(True)
            assert expected is not None
            assert heads["per_device"][str(size)] == expected, (groups, size)


@pytest.mark.parametrize("name", RUN)
def test_logprobs_and_greedy_continuation(answered, figure, name):
    folders, _, answer, logprobs, prompt = answered
    said = interop.greedy(folders[name], prompt, N_NEW)
    assert answer["greedy"][name] == said
    logits = torch.tensor(interop.logits_of(folders[name], [prompt + said[:-1]])[0, len(prompt) - 1 :])
    difference = float(np.abs(logprobs[name] - logits.log_softmax(-1).numpy()).max())
    figure("vLLM: logarithms of probabilities, llama", difference)
    assert difference < 1e-4


# Latent attention, with the code of transformers inside vLLM. Its own code of DeepSeek-V3 (0.32, on the CPU) differs,
# for a random DeepSeek-V3 that transformers made too.
# On processors with AMX, its kernel of latent attention on the CPU refuses float32; these tests compare float32.
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
LATENT = {"stock": ("--frequencies", "stock"), "longrope": ("--frequencies", "longrope")}


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(tmp_path, figure, name):
    environment = interop.need("vllm")
    tokenizer = interop.make_tokenizer(tmp_path / "tokenizer")
    shape = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16}
    source = interop.make_source(tmp_path / "source", "llama", tokenizer, **{**SIZE, **shape})
    interop.call("mha-to-mla", source, tmp_path / "out", *LATENT[name], "--calibration", "none")
    (prompt,) = interop.token_ids(1, vocab_size=256)
    request = {"folders": {"out": tmp_path / "out"}, "sizes": [1], "run": ["out"], "impl": {"out": "transformers"}}
    if HAS_AMX:
        request["variables"] = {"VLLM_MLA_DISABLE": "1"}
    answer, logprobs = interop.ask(
        environment, "vllm_logits", tmp_path / "asked", **request, prompt=prompt, n_new=N_NEW
    )
    said = interop.greedy(tmp_path / "out", prompt, N_NEW)
    assert answer["greedy"]["out"] == said
    logits = torch.tensor(interop.logits_of(tmp_path / "out", [prompt + said[:-1]])[0, len(prompt) - 1 :])
    difference = float(np.abs(logprobs["out"] - logits.log_softmax(-1).numpy()).max())
    figure(f"vLLM: logarithms of probabilities, latent attention, {name}", difference)
    assert difference < 1e-4


def test_its_own_code_stops_at_frequencies_that_it_does_not_compute(tmp_path):
    environment = interop.need("vllm")
    tokenizer = interop.make_tokenizer(tmp_path / "tokenizer")
    shape = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16}
    source = interop.make_source(tmp_path / "source", "llama", tokenizer, **{**SIZE, **shape})
    interop.call("mha-to-mla", source, tmp_path / "out", "--calibration", "none")
    request = {"folders": {"out": tmp_path / "out"}, "sizes": [1], "run": ["out"], "prompt": [5, 6], "n_new": 2}
    with pytest.raises(AssertionError, match="yarn"):
        interop.ask(environment, "vllm_logits", tmp_path / "asked", **request)
