"""`uptrain run` on texts: the same run as on a cache prepared before."""

import json

import pytest
import tiny
import training
from tokenizers_ import SENTENCES, make_tokenizer

VOCAB = 300


@pytest.fixture
def model(tmp_path):
    folder = tiny.save(tiny.build(vocab_size=VOCAB, num_key_value_heads=2), tmp_path / "model")
    return make_tokenizer(folder, VOCAB)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES * 8))
    return path


def arguments(model, data, out, *more):
    fixed = ["run", model, "--data", data, "--out", out, "--steps", 6, "--lr", 1e-3, "--original-tokens", "1M"]
    return [str(x) for x in (*fixed, "--global-batch-tokens", 256, *more)]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_same_run_as_on_a_cache(uptrain, tmp_path, model, texts, processes):
    cache = tmp_path / "cache"
    options = ("--tokenizer", model, "--seq-len", 64, "--out", cache)
    assert uptrain("prepare", "--data", texts, *options).code == 0
    direct, prepared = tmp_path / "direct", tmp_path / "prepared"
    held_out = ("--eval-data", texts)
    jobs = [arguments(model, texts, direct, *held_out), arguments(model, cache, prepared, *held_out)]
    training.drive([{"arguments": job} for job in jobs], processes)
    training.assert_same_run(direct, prepared)
    assert (tmp_path / "direct.data/manifest.json").read_bytes() == (cache / "manifest.json").read_bytes()
    assert (tmp_path / "prepared.eval-data").is_dir()


def test_the_model_says_how_long_windows_are(uptrain, tmp_path, model, texts):
    assert uptrain(*arguments(model, texts, tmp_path / "run")).code == 0
    assert json.loads((tmp_path / "run.data/manifest.json").read_text())["seq_len"] == 64
    refused = uptrain(*arguments(model, tmp_path / "run.data", tmp_path / "other", "--seq-len", 32))
    refused.refused("windows of 64 tokens, not 32", "leave --seq-len out")
    tiny.edit_config(model, max_position_embeddings=...)
    uptrain(*arguments(model, texts, tmp_path / "third")).refused("--seq-len")


def test_from_a_file_of_options(uptrain, tmp_path, model, texts):
    path = tmp_path / "run.toml"
    path.write_text(
        f'data = "{texts}"\nseq-len = 32\nsteps = 6\nlr = 1e-3\noriginal-tokens = "1M"\nglobal_batch_tokens = 256\n'
    )
    assert uptrain("run", model, "--config", path, "--steps", 5, "--out", tmp_path / "run").code == 0
    run = json.loads((tmp_path / "run/run.json").read_text())["settings"]
    assert (run["steps"], run["lr"], run["global_batch"]) == (5, 1e-3, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("speed = 3", ["sets 'speed'", "no option"]),
        ('config = "other.toml"', ["sets 'config'", "no option"]),
        ("steps = = 3", ["run.toml cannot be read"]),
        ("steps = -3", ["steps"]),
    ],
)
def test_bad_files_of_options(uptrain, tmp_path, content, words):
    path = tmp_path / "run.toml"
    path.write_text(content)
    options = ("--config", path, "--data", tmp_path, "--out", tmp_path / "run")
    uptrain("run", tmp_path, *options).refused(*words)


def test_nothing_is_tokenised_for_a_run_that_exists(uptrain, tmp_path, model, texts):
    (tmp_path / "run").mkdir()
    uptrain(*arguments(model, texts, tmp_path / "run")).refused("exists already", "choose another --out")
    assert not list(tmp_path.glob("*run.data*"))


def test_no_such_texts(uptrain, tmp_path, model):
    uptrain(*arguments(model, tmp_path / "nowhere", tmp_path / "run")).refused("nowhere")
