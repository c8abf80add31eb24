"""Models without a language-model head, such as reward models and base models: they convert, and are not trained."""

import json

import pytest
import tiny
import torch
from tiny_tokenizers import make_tokenizer
from transformers import AutoModel, AutoModelForSequenceClassification

from model.checkpoint import open_checkpoint
from model.completeness import has_lm_head

NOTHING_TO_PREDICT = "has no language-model head: it lacks the tensor lm_head.weight"
CLASSES = [
    ("llama", AutoModelForSequenceClassification),
    ("mistral", AutoModel),
    ("gemma", AutoModelForSequenceClassification),
    ("gemma", AutoModel),
    ("phi", AutoModel),
]


def make_source(family, kind, folder):
    config = tiny.make_config(family, vocab_size=300, tie_word_embeddings=family == "gemma")
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return make_tokenizer(tiny.save(kind.from_config(config), folder), 300)


@pytest.mark.parametrize(("family", "kind"), CLASSES)
def test_the_result_of_a_conversion_names_no_command_that_cannot_work(convert, tmp_path, family, kind):
    source, out = make_source(family, kind, tmp_path / "source"), tmp_path / "out"
    shown = convert("mha-to-gqa", source, out, "--groups", 2, "--calibration-tokens", 1024).succeeded().out
    assert "It has no language-model head, so uptrain does not measure or train it." in shown
    assert "uptrain evaluate" not in shown and "uptrain run" not in shown
    kind.from_pretrained(out)


@pytest.mark.parametrize(("family", "kind"), CLASSES)
def test_uptrain_refuses_before_it_tokenises(uptrain, tmp_path, monkeypatch, family, kind):
    folder, text = make_source(family, kind, tmp_path / "source"), tmp_path / "text.txt"
    text.write_text("A folder. " * 1000)
    uptrain("prepare", "--data", text, "--tokenizer", folder, "--seq-len", 16, "--out", tmp_path / "cache").succeeded()
    for name in ("uptrain.evaluate_folder.ensure_cache", "uptrain.runs.launch.ensure_cache"):
        monkeypatch.setattr(name, None)  # must not be called
    budget = ("--steps", 2, "--global-batch-tokens", 64, "--lr", 1e-3, "--seq-len", 16)
    for given in (
        ("evaluate", folder, "--data", text, "--seq-len", 16),
        ("plan", folder, *budget),
        ("run", folder, "--data", text, *budget, "--out", tmp_path / "run"),
        ("teach", folder, "--data", tmp_path / "cache", "--top-k", 4, "--out", tmp_path / "logits"),
    ):
        uptrain(*given).refused(str(folder), NOTHING_TO_PREDICT, f"architectures: ['{type_name(folder)}']")
    assert not (tmp_path / "run").exists()


def type_name(folder):
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def test_a_parent_without_an_lm_head_is_no_teacher(uptrain, tmp_path):
    student = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "student"), 300)
    teacher = make_source("llama", AutoModel, tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("A folder. " * 1000)
    budget = ("--steps", 2, "--global-batch-tokens", 64, "--lr", 1e-3, "--seq-len", 16)
    for given in (("evaluate", "--data", tmp_path / "text.txt", "--seq-len", 16), ("plan", *budget)):
        uptrain(given[0], student, "--teacher", teacher, *given[1:]).refused(str(teacher), NOTHING_TO_PREDICT)


@pytest.mark.parametrize("family", tiny.FITTED)
@pytest.mark.parametrize("tied", [False, True])
def test_every_causal_language_model_has_an_lm_head(tmp_path, family, tied):
    folder = tiny.save(tiny.build(family, tie_word_embeddings=tied), tmp_path / "source")
    with open_checkpoint(folder) as checkpoint:
        assert has_lm_head(checkpoint)
