"""CTranslate2 converts what we write, and computes from it what transformers does."""

import interop
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Not phi3, which it converts from older transformers only, nor gemma2, of which it leaves out query_pre_attn_scalar and
# the soft caps.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
N_NEW = 20
SETTINGS = {"gemma": {"head_dim": 16}, "qwen3": {"head_dim": 16}}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    environment = interop.need("ctranslate2")
    place = tmp_path_factory.mktemp("ctranslate2")
    tokenizer, folders = interop.make_tokenizer(place / "tokenizer"), {}
    for family in FAMILIES:
        size = {**interop.WIDE, **SETTINGS.get(family, {})}
        source = interop.make_source(place / family / "source", family, tokenizer, **size)
        for groups, out in interop.convert_to_all(source, place / family).items():
            folders[f"{family} {groups}"] = out
    request = {"folders": folders, "ids": interop.token_ids(vocab_size=256), "n_new": N_NEW}
    answer, logits = interop.ask(environment, "ctranslate2_logits", place / "asked", **request)
    return folders, answer, logits, request["ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(answered, figure, family):
    folders, _, logits, ids = answered
    for groups in (8, 4, 2, 1):
        name = f"{family} {groups}"
        expected = interop.logits_of(folders[name], ids)
        assert np.std(expected) > 0.01
        difference = float(np.abs(logits[name] - expected).max())
        figure(f"CTranslate2: logits, {family}", difference)
        assert difference < 1e-4, name


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation(answered, family):
    folders, answer, _, ids = answered
    for groups in (8, 4, 2, 1):
        name = f"{family} {groups}"
        assert answer["greedy"][name] == interop.greedy(folders[name], ids[0], N_NEW), name
