"""llama.cpp's converter makes GGUF files of what we write, and its engine computes from them what transformers does."""

from pathlib import Path

import interop
import numpy as np
import pytest
import tiny
import tiny_tokenizers
from gguf import GGUFReader
from gguf_files import write_gguf
from transformers import AutoConfig

from model.checkpoint import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "gemma")
# llama.cpp knows no other Gemma.
BASE = 10000.0
SETTINGS = {
    "gemma": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": BASE}},
}
ARCHITECTURES = {"mistral": "llama"}  # its name in a GGUF file
NEW = "llama, transformers 5"
SOURCES = (*FAMILIES, NEW)
N_NEW, VOCAB = 20, 320


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    environment = interop.need("llama_cpp")
    place = tmp_path_factory.mktemp("llama_cpp")
    tokenizer = place / "tokenizer"
    interop.ask(
        environment,
        "sentencepiece_tokenizer",
        place / "trained",
        sentences=tiny_tokenizers.SENTENCES[:3],
        vocab_size=VOCAB,
    )
    tokenizer.mkdir()
    (place / "trained/tokenizer.model").rename(tokenizer / "tokenizer.model")
    of_qwen2 = interop.make_tokenizer(place / "bpe")
    folders: dict[str, Path] = {}
    for name in SOURCES:
        family, size = name.split(",")[0], {**interop.WIDE, "vocab_size": VOCAB, **SETTINGS.get(name, {})}
        own = of_qwen2 if family == "qwen2" else tokenizer
        source = interop.make_source(place / name / "source", family, own, old=name != NEW, **size)
        for groups, out in interop.convert_to_all(source, place / name).items():
            folders[f"{name} {groups}"] = out
    request = {"folders": folders, "ids": interop.token_ids(vocab_size=VOCAB), "n_new": N_NEW, "pre": "qwen2"}
    answer, logits = interop.ask(environment, "llama_cpp_logits", place / "asked", **request)
    return folders, answer, logits, request["ids"], place / "asked"


@pytest.mark.parametrize("source", SOURCES)
def test_logits(answered, figure, source):
    folders, answer, logits, ids, _ = answered
    family = source.split(",")[0]
    key = ARCHITECTURES.get(family, family)
    for groups in (8, 4, 2, 1):
        name = f"{source} {groups}"
        facts = answer["metadata"][name]
        assert facts["general.architecture"] == key
        assert int(facts[f"{key}.attention.head_count_kv"]) == groups
        assert float(facts.get(f"{key}.rope.freq_base", BASE)) == (BASE if family == "gemma" else interop.THETA)
        expected = interop.logits_of(folders[name], ids)
        difference = float(np.abs(logits[name] - expected).max() / np.abs(expected).max())
        figure(f"llama.cpp: logits, {source} (relative)", difference)
        assert difference < 1e-3, name


@pytest.mark.parametrize("source", SOURCES)
def test_greedy_continuation(answered, source):
    folders, answer, _, ids, _ = answered
    for groups in (8, 4, 2, 1):
        name = f"{source} {groups}"
        assert answer["greedy"][name] == interop.greedy(folders[name], ids[0], N_NEW), name


CONFIG = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "max_position_embeddings", "vocab_size", "tie_word_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("source", [name for name in SOURCES if name.split(",")[0] in ("llama", "mistral", "qwen2")])
def test_groupwise_reads_the_files_of_llama_cpp(answered, source):
    """A file of llama.cpp's converter is read as the folder that it was made from, to the last bit."""
    folders, _, _, _, place = answered
    for groups in (8, 2):
        name = f"{source} {groups}"
        expected = tiny.tensors(folders[name])
        written = AutoConfig.from_pretrained(folders[name])
        with open_checkpoint(place / f"{name}.gguf") as checkpoint:
            assert checkpoint.config["rope_theta"] == interop.THETA == written.rope_parameters["rope_theta"]
            for key in CONFIG:
                assert checkpoint.config[key] == getattr(written, key), key
            assert checkpoint.tensors.keys() == expected.keys()
            for key, tensor in expected.items():
                assert np.array_equal(checkpoint.rows(key, 0, len(tensor)), tensor.float().numpy()), key


QUANTISED = {
    "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0", "Q2_K": "Q2_K", "Q3_K_M": "Q3_K",
    "Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "IQ3_S": "IQ3_S", "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_XS",
}  # fmt: skip
"""What llama.cpp calls a kind of file, and the type of most matrices in it."""


def test_quantised_files_have_the_values_of_llama_cpp(tmp_path):
    """Those that llama.cpp widens them to, to the last bit."""
    environment = interop.need("llama_cpp")
    size = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    source = write_gguf(tmp_path / "source.gguf", tiny.build(**size, vocab_size=VOCAB, tie_word_embeddings=False))
    place = tmp_path / "asked"
    interop.ask(environment, "llama_cpp_quantised", place, source=source, kinds=list(QUANTISED))
    for kind, stored in QUANTISED.items():
        assert stored in {tensor.tensor_type.name for tensor in GGUFReader(place / f"{kind}.gguf").tensors}
        with open_checkpoint(place / f"{kind}.gguf") as own, open_checkpoint(place / f"{kind}-widened.gguf") as widened:
            assert own.tensors.keys() == widened.tensors.keys()
            for name, tensor in own.tensors.items():
                values, expected = (each.rows(name, 0, tensor.shape[0]) for each in (own, widened))
                assert np.array_equal(values, expected), (kind, name)


QUERIES, GROUPS = "deepseek2.attention.q_lora_rank", "deepseek2.expert_group_count"
OVERRIDES = {QUERIES: 0, GROUPS: 0}
"""llama.cpp requires a rank of queries of a DeepSeek-V3, which the converter writes only where they have one; and fewer
groups of experts than experts, where ours has one of each, which no layer uses."""
LATENT = {
    "f32": ("stock", "f32", 1e-3),
    "bf16": ("stock", "bf16", 0.05),
    "f16": ("stock", "f16", None),
    "longrope": ("longrope", "f32", None),
}
"""Frequencies, the type of the GGUF file, and the difference of logits; None where it is wrong."""


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """Return a request about folders of latent attention, and a folder whose norm is undone by a bias."""
    place = tmp_path_factory.mktemp("latent")
    tokenizer = interop.make_tokenizer(place / "tokenizer")
    source = interop.make_source(place / "source", "llama", tokenizer, **interop.WIDE)
    fixed = ("--latent", 48, "--calibration", "none")
    for name, (frequencies, _, _) in LATENT.items():
        # 16 numbers are two channels for each pair of a head of 8, which only longrope expresses.
        rope = 16 if frequencies == "longrope" else 8
        interop.call("mha-to-mla", source, place / name, *fixed, "--rope", rope, "--frequencies", frequencies)
    options = ("--rope", 8, "--frequencies", "stock", "--latent-norm", "bias")
    interop.call("mha-to-mla", source, place / "bias", *fixed, *options)
    outtype = {name: outtype for name, (_, outtype, _) in LATENT.items()}
    ids = interop.token_ids(vocab_size=256)
    folders = {name: place / name for name in LATENT}
    return {"folders": folders, "ids": ids, "n_new": N_NEW, "pre": "gpt-2", "outtype": outtype}, place / "bias"


@pytest.fixture(scope="module")
def asked_of_latents(latents, tmp_path_factory):
    environment, (request, _) = interop.need("llama_cpp"), latents
    place = tmp_path_factory.mktemp("asked")
    return interop.ask(environment, "llama_cpp_logits", place / "now", **request, overrides=OVERRIDES)


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(latents, asked_of_latents, figure, name):
    (answer, logits), (request, _) = asked_of_latents, latents
    facts, (_, _, tolerance) = answer["metadata"][name], LATENT[name]
    assert facts["general.architecture"] == "deepseek2"
    assert int(facts["deepseek2.attention.kv_lora_rank"]) == 48
    expected = interop.logits_of(request["folders"][name], request["ids"])
    difference = float(np.abs(logits[name] - expected).max() / np.abs(expected).max())
    figure(f"llama.cpp: logits, latent attention, {name} (relative)", difference)
    if tolerance is None:
        assert not difference < 0.05
        return
    assert difference < tolerance
    if name == "f32":
        assert answer["greedy"][name] == interop.greedy(request["folders"][name], request["ids"][0], N_NEW)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [({GROUPS: 0}, f"key not found in model: {QUERIES}"), ({QUERIES: 0}, "n_expert_groups < hparams.n_expert")],
)
def test_latent_attention_needs_both_overrides(latents, tmp_path, monkeypatch, overrides, words):
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    environment, (request, _) = interop.need("llama_cpp"), latents
    one = {**request, "folders": {"f32": request["folders"]["f32"]}, "verbose": True, "overrides": overrides}
    with pytest.raises(AssertionError, match=words):
        interop.ask(environment, "llama_cpp_logits", tmp_path / "asked", **one)


def test_a_norm_undone_by_a_bias_is_refused(latents, tmp_path):
    environment, (request, biased) = interop.need("llama_cpp"), latents
    one = {**request, "folders": {"bias": biased}, "verbose": True, "overrides": OVERRIDES}
    with pytest.raises(AssertionError, match="wrong number of tensors"):
        interop.ask(environment, "llama_cpp_logits", tmp_path / "asked", **one)
