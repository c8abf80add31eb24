"""What `convert mha-to-gqa` does where no method is given: the best that the model allows, and it says which."""

import json
import lzma
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny
from calibrated import record
from sentencepiece import SentencePieceProcessor
from tiny_tokenizers import make_sentencepiece, make_tokenizer

from convert.calibration_text.read import read_calibration_text
from model import tokenizer
from model.checkpoint import open_checkpoint
from model.tokenizer import open_tokenizer

TOKENS = ("--calibration-tokens", 1024)
FIT_RECORD = {"method": "fit", "refit": True, "refine": 1024}
MEAN_RECORD = {"method": "mean", "refit": False, "calibration": None}


@pytest.fixture
def source(tmp_path):
    return make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)


def chosen(convert, source, out, *options):
    """Convert; return what was done, and what was said of it."""
    result = convert("mha-to-gqa", source, out, "--groups", 2, *options, "--json").succeeded()
    return record(out), json.loads(result.out)["notes"]


def test_fit_refit_and_refine_where_the_model_can_run(convert, source, tmp_path):
    plan, notes = chosen(convert, source, tmp_path / "out", *TOKENS)
    assert plan.items() >= FIT_RECORD.items()
    assert plan["calibration"]["text"] == "shipped"
    assert not notes
    chosen(convert, source, tmp_path / "asked", *TOKENS, "--method", "fit", "--refit", "--refine", 1024)
    assert tiny.snapshot(tmp_path / "out") == tiny.snapshot(tmp_path / "asked")


def test_given_options_are_kept(convert, source, tmp_path):
    plan, notes = chosen(convert, source, tmp_path / "out", *TOKENS, "--refine", 0)
    assert plan.items() >= {**FIT_RECORD, "refine": 0}.items()
    assert not notes


def test_without_calibration_the_default_is_mean(convert, source, tmp_path):
    plan, notes = chosen(convert, source, tmp_path / "out", "--calibration", "none")
    assert plan.items() >= MEAN_RECORD.items()
    assert not notes


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("llama", "has no tokenizer.json"),
        ("gemma", "has no tokenizer.json"),
        ("cohere", "normalises queries or keys afterwards, and subtracts their mean"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--refit",), TOKENS, ("--calibration", "shipped")])
def test_without_the_default_method_another_must_be_requested(convert, tmp_path, family, why, options):
    norms = {"use_qk_norm": True} if family == "cohere" else {}
    source, out = tiny.save(tiny.build(family, **norms), tmp_path / "source"), tmp_path / "out"
    (source / "tokenizer.json").unlink()
    convert("mha-to-gqa", source, out, "--groups", 2, *options).refused(
        "the default merge is not possible: ", why, "--method mean is the paper's merge"
    )
    assert not out.exists()
    convert("mha-to-gqa", source, out, "--groups", 2, "--method", "mean").succeeded()


def test_contradictory_options(convert, source, tmp_path):
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--calibration", "none", "--refit").refused(
        "--refit needs a calibration text"
    )


def test_a_damaged_tokenizer_is_no_reason_for_another_method(convert, source, tmp_path):
    (source / "tokenizer.json").write_text("{}")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2).refused("tokenizer.json is damaged")


def test_a_wrong_value_is_no_reason_for_another_method(convert, source, tmp_path):
    tiny.edit_config(source, rms_norm_eps="1e-5")
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2)
    result.refused("config.json has rms_norm_eps = '1e-5'; it must be a finite number of at least 0.")
    assert "--method mean" not in result.err


def test_nothing_to_merge_needs_no_method(convert, source, tmp_path):
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 8).succeeded()
    assert record(tmp_path / "out")["method"] == "mean"


def test_without_torch(source, tmp_path):
    code = "import sys; sys.modules['torch'] = None; from convert.cli import main; main()"
    command = [sys.executable, "-c", code, "mha-to-mqa", str(source), str(tmp_path / "out")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "calibrating runs the model, which needs torch" in refused.stderr
    assert "--method mean" in refused.stderr
    subprocess.run([*command, "--method", "mean"], capture_output=True, check=True)
    assert record(tmp_path / "out").items() >= MEAN_RECORD.items()


def test_a_tokenizer_without_tokenizer_json(convert, source, tmp_path):
    """Made of a vocabulary and its merges by transformers, it gives the same tokens."""
    whole = json.loads((source / "tokenizer.json").read_text())["model"]
    slow = shutil.copytree(source, tmp_path / "slow")
    (slow / "tokenizer.json").unlink()
    (slow / "vocab.json").write_text(json.dumps(whole["vocab"]))
    (slow / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in whole["merges"]) + "\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (slow / "tokenizer_config.json").write_text(json.dumps(settings))
    for folder in (source, slow):
        chosen(convert, folder, tmp_path / f"{folder.name}-out", *TOKENS)
    whole_ids, slow_ids = (
        np.frombuffer(lzma.decompress((tmp_path / f"{name}-out/groupwise_calibration.xz").read_bytes()), "<u2")
        for name in ("source", "slow")
    )
    body = whole_ids.reshape(-1, 64)[:, 1:].ravel()  # without the token that this tokenizer puts first
    assert np.array_equal(slow_ids[: len(body)], body)


def test_a_vocabulary_of_sentencepiece(convert, source, tmp_path):
    """A Vicuna has no other file; the tokens are those of sentencepiece itself."""
    (source / "tokenizer.json").unlink()
    make_sentencepiece(source)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **special}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    prose = tmp_path / "prose.txt"
    prose.write_text("A dog, a fox: über alles.\n" * 100)
    chosen(convert, source, tmp_path / "out", "--calibration", prose, *TOKENS)
    ids = np.frombuffer(lzma.decompress((tmp_path / "out/groupwise_calibration.xz").read_bytes()), "<u2")
    own = SentencePieceProcessor(model_file=str(source / "tokenizer.model"))
    assert ids.reshape(-1, 64)[:, 1:].ravel().tolist() == own.encode(prose.read_text())[: len(ids) * 63 // 64]


@pytest.mark.parametrize("tokenizer_class", ["LLaMATokenizer", "LlamaTokenizer", None])
@pytest.mark.parametrize("special", ["", "<s>"])
def test_the_settings_of_llama_1(source, tokenizer_class, special):
    """Its folders name empty special tokens, or say nothing of BOS, which its texts begin with."""
    (source / "tokenizer.json").unlink()
    (source / "special_tokens_map.json").write_text("{}")
    make_sentencepiece(source)
    others = {"eos_token": "", "unk_token": ""} if not special else {}
    kind = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    settings = {"bos_token": special, **others, **kind, "model_max_length": 1000}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    own = SentencePieceProcessor(model_file=str(source / "tokenizer.model"))
    with open_checkpoint(source) as checkpoint:
        assert read_calibration_text(checkpoint, "shipped", 1024).bos_ids == (own.bos_id(),)
    opened = open_tokenizer(source)
    assert opened("a fox").input_ids == [own.bos_id(), *own.encode("a fox")]
    assert opened.eos_token_id == own.eos_id()


def test_a_vocabulary_that_cannot_be_opened(convert, source, tmp_path):
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"\nof sentencepiece")
    convert("mha-to-mqa", source, tmp_path / "out").refused(
        f"{source} has no tokenizer.json, which calibrating needs", "tokenizer.model is damaged"
    )


def test_without_the_library_of_a_vocabulary(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"\nof sentencepiece")
    convert("mha-to-mqa", source, tmp_path / "out").refused("needs `pip install sentencepiece protobuf`")


def test_a_vocabulary_of_tiktoken(convert, source, tmp_path):
    """Llama 3's file has the name of Llama 2's."""
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    convert("mha-to-mqa", source, tmp_path / "out").refused(
        "no tokenizer.json", "a file of tiktoken", "save_pretrained"
    )


def test_a_text_that_describes_the_tokenizer_only(convert, source, tmp_path):
    """Without a vocabulary, transformers would make an empty tokenizer."""
    (source / "tokenizer.json").unlink()
    convert("mha-to-mqa", source, tmp_path / "out").refused("has no tokenizer.json", "save_pretrained")


def test_a_tokenizer_of_bytes(convert, source, tmp_path):
    """No tokenizer.json holds it, so saving it is no advice."""
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    refused = convert("mha-to-mqa", source, tmp_path / "out")
    refused.refused("has no tokenizer.json", "give a text of token ids with --calibration")
    assert "save_pretrained" not in refused.err
