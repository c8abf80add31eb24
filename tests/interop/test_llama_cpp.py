"""llama.cpp's converter makes GGUF files of what we write, and its engine computes from them what transformers does."""

from pathlib import Path

import interop
import numpy as np
import pytest
import tiny_tokenizers

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
    folders: dict[str, Path] = {}
    for name in SOURCES:
        family, size = name.split(",")[0], {**interop.WIDE, "vocab_size": VOCAB, **SETTINGS.get(name, {})}
        source = interop.make_source(place / name / "source", family, tokenizer, old=name != NEW, **size)
        for groups, out in interop.convert_to_all(source, place / name).items():
            folders[f"{name} {groups}"] = out
    request = {"folders": folders, "ids": interop.token_ids(vocab_size=VOCAB), "n_new": N_NEW}
    answer, logits = interop.ask(environment, "llama_cpp_logits", place / "asked", **request)
    return folders, answer, logits, request["ids"]


@pytest.mark.parametrize("source", SOURCES)
def test_logits(answered, figure, source):
    folders, answer, logits, ids = answered
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
    folders, answer, _, ids = answered
    for groups in (8, 4, 2, 1):
        name = f"{source} {groups}"
        assert answer["greedy"][name] == interop.greedy(folders[name], ids[0], N_NEW), name
