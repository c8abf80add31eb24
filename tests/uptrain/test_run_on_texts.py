"""`uptrain run` on texts: the same run as on a cache prepared before."""

import json
import multiprocessing.util
import os
import shutil
import signal
import tempfile

import pytest
import real_runs
import tiny
from faulty_runs import succeed
from safetensors.torch import save_file
from tiny_tokenizers import SENTENCES, make_tokenizer

from uptrain import evaluate_folder
from uptrain.data.run_data import surplus_warning

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
    uptrain("prepare", "--data", texts, *options).succeeded()
    direct, prepared = tmp_path / "direct", tmp_path / "prepared"
    held_out = ("--eval-data", texts)
    jobs = [arguments(model, texts, direct, *held_out), arguments(model, cache, prepared, *held_out)]
    real_runs.drive([{"arguments": job} for job in jobs], processes)
    real_runs.assert_same_run(direct, prepared)
    assert (tmp_path / "direct.data/manifest.json").read_bytes() == (cache / "manifest.json").read_bytes()
    assert (tmp_path / "prepared.eval-data").is_dir()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_evaluation_as_on_a_cache(uptrain, tmp_path, monkeypatch, model, texts, processes):
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    uptrain("prepare", "--data", texts, "--tokenizer", model, "--seq-len", 32, "--out", cache).succeeded()
    results = []
    for data in ((cache,), (texts, "--seq-len", 32)):
        result = succeed(("evaluate", model, "--json", "--data", *data), tmp_path, processes)[0]
        results.append(json.loads(result.out))
        assert results[-1].pop("data") == str(data[0])
    assert results[0] == results[1]
    assert list(scratch.iterdir()) == []
    uptrain("evaluate", model, "--data", tmp_path / "none").refused("none: no such file or folder")
    uptrain("evaluate", model, "--data", cache, "--seq-len", 16).refused("windows of 32 tokens, not 16")


def test_a_terminated_evaluation_leaves_no_tokens(uptrain, tmp_path, monkeypatch, model, texts):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    multiprocessing.util.get_temp_dir()  # which Python keeps: later tests shall not have this one's long path
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(evaluate_folder, "load_evaluated", lambda folder: os.kill(os.getpid(), signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    result = uptrain("evaluate", model, "--data", texts)
    signal.signal(signal.SIGTERM, handler)
    assert (result.code, "interrupted" in result.err) == (1, True)
    assert list(scratch.iterdir()) == []


def test_the_model_says_how_long_windows_are(uptrain, tmp_path, model, texts):
    uptrain(*arguments(model, texts, tmp_path / "run")).succeeded()
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
    uptrain("run", model, "--config", path, "--steps", 5, "--out", tmp_path / "run").succeeded()
    run = json.loads((tmp_path / "run/run.json").read_text())["settings"]
    assert (run["steps"], run["lr"], run["global_batch"]) == (5, 1e-3, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("speed = 3", ["sets 'speed'", "no option"]),
        ('config = "other.toml"', ["sets 'config'", "no option"]),
        ('eval-data = "a"\neval_data = "b"', ["sets --eval-data twice"]),
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


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {}, "under other names than the files do"),
        ("mistral", {"lose": "lm_head.weight"}, "lacks the tensor lm_head.weight"),
        (
            "llama",
            {"says": VOCAB + 8},
            "300 rows in model.embed_tokens.weight, but its config.json says vocab_size = 308",
        ),
        (
            "qwen3",
            {"says": VOCAB - 8},
            "300 rows in model.embed_tokens.weight, but its config.json says vocab_size = 292",
        ),
        ("phi3", tiny.LONGROPE, "use windows of 16 tokens at most (--seq-len 16)"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_texts_are_tokenised(uptrain, tmp_path, texts, family, changes, words):
    changes = dict(changes)
    lost, says = changes.pop("lose", None), changes.pop("says", VOCAB)
    model = make_tokenizer(tiny.save(tiny.build(family, vocab_size=VOCAB, **changes), tmp_path / "model"), VOCAB)
    if lost:
        tensors = tiny.tensors(model)
        del tensors[lost]
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    tiny.edit_config(model, vocab_size=says)
    uptrain(*arguments(model, texts, tmp_path / "run")).refused(words)
    assert not list(tmp_path.glob("*run.data*"))


def test_a_teacher_of_another_vocabulary_is_refused_before_texts_are_tokenised(uptrain, tmp_path, model, texts):
    teacher = tiny.save(tiny.build(vocab_size=VOCAB + 1), tmp_path / "teacher")
    uptrain(*arguments(model, texts, tmp_path / "run", "--teacher", teacher)).refused("has 301 tokens, the student 300")
    assert not list(tmp_path.glob("*run.data*"))


def test_a_token_for_padding_that_the_model_has_no_embedding_of(uptrain, tmp_path, model, texts):
    """Many a Llama-2 has one: it matters only where a text holds it."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": VOCAB, "content": "<padding>", **special})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    uptrain(*arguments(model, texts, tmp_path / "run")).succeeded()
    texts.write_text(json.dumps({"text": f"{SENTENCES[0]} <padding> {SENTENCES[1]}"}) + "\n")
    refused = uptrain(*arguments(model, texts, tmp_path / "other"))
    assert refused.code == 2
    assert "holds the id 300, but the model knows only those below 300" in refused.err.splitlines()[-1]


def test_held_out_data_that_are_the_training_data(uptrain, tmp_path, model, texts):
    warned = uptrain(*arguments(model, texts, tmp_path / "run", "--eval-data", texts)).succeeded()
    assert f"Warning: {texts} is in both --data and --eval-data" in warned.err
    assert "the held-out data are the training data" not in warned.err, "warned of once"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(texts.read_text().splitlines(keepends=True)[:9]))
    of_others = uptrain(*arguments(model, texts, tmp_path / "run2", "--eval-data", other)).succeeded().err
    assert of_others.count("Warning") == of_others.count("Warning: the evaluations read") == 1


def test_held_out_text_that_is_part_of_the_training_text(uptrain, tmp_path, model, texts):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, sentences in (("a", SENTENCES[::2]), ("b", SENTENCES[1::2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences * 9))
    link = tmp_path / "link.jsonl"
    link.symlink_to(folder / "b.jsonl")
    warned = uptrain(*arguments(model, folder, tmp_path / "run", "--eval-data", link)).succeeded()
    assert f"Warning: {link} is in both --data and --eval-data, so held-out losses" in warned.err
    assert "is part of the training data" not in warned.err, "warned of once"
    caches = []
    for name, data in (("train", (folder / "a.jsonl", link)), ("held", (folder / "b.jsonl",))):
        words = [word for path in data for word in ("--data", path)]
        uptrain("prepare", *words, "--tokenizer", model, "--seq-len", 16, "--out", tmp_path / name).succeeded()
        caches.append(tmp_path / name)
    warned = uptrain(*arguments(model, caches[0], tmp_path / "run2", "--eval-data", caches[1])).succeeded()
    assert f"Warning: the held-out text {folder}/b.jsonl is part of the training data" in warned.err
    of_folder = tmp_path / "of_folder"
    uptrain("prepare", "--data", folder, "--tokenizer", model, "--seq-len", 16, "--out", of_folder).succeeded()
    for name, data, held_out, text in (
        ("run3", of_folder, folder / "b.jsonl", f"text {folder}/b.jsonl"), ("run4", of_folder, caches[1], "text "),
        ("run5", folder, caches[1], "text "), ("run6", folder / "b.jsonl", of_folder, "text, in 1 of its 2 files, "),
    ):  # fmt: skip
        warned = uptrain(*arguments(model, data, tmp_path / name, "--eval-data", held_out)).succeeded()
        assert f"Warning: the held-out {text}" in warned.err, name
        assert warned.err.count("so held-out losses will not be those of new text.") == 1
    caches = []
    for name, sentences in (("one", SENTENCES[::3]), ("two", SENTENCES[1::3])):  # each with an empty file
        (tmp_path / name).mkdir()
        (tmp_path / name / "empty.jsonl").write_bytes(b"")
        (tmp_path / name / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences * 9))
        options = ("--tokenizer", model, "--seq-len", 16, "--out", tmp_path / f"{name}-cache")
        uptrain("prepare", "--data", tmp_path / name, *options).succeeded()
        caches.append(tmp_path / f"{name}-cache")
    apart = uptrain(*arguments(model, caches[0], tmp_path / "run8", "--eval-data", caches[1])).succeeded()
    assert "is part of the training data" not in apart.err
    same = uptrain(*arguments(model, of_folder, tmp_path / "run7", "--eval-data", of_folder)).succeeded()
    assert "Warning: the held-out data are the training data" in same.err


def test_a_run_that_was_moved_with_its_data(uptrain, tmp_path, model, texts):
    """As to another machine, where nothing lies where it lay."""
    away = tmp_path / "away"
    away.mkdir()
    whole, run = tmp_path / "whole", tmp_path / "run"
    uptrain(*arguments(model, texts, whole, "--eval-data", texts)).succeeded()
    uptrain(*arguments(model, texts, run, "--eval-data", texts, "--max-minutes", 0)).succeeded()
    run.rename(away / "moved")
    for what in ("data", "eval-data"):
        (tmp_path / f"run.{what}").rename(away / f"held.{what}")
    gone = uptrain("resume", away / "moved")
    gone.refused(f"the run's data, {tmp_path}/run.data, are missing", f"put them at {away}/moved.data")
    for what in ("data", "eval-data"):
        (away / f"held.{what}").rename(away / f"moved.{what}")
    uptrain("resume", away / "moved").succeeded()
    real_runs.assert_same_run(away / "moved", whole)


def test_far_more_texts_than_the_run_reads_are_warned_of(tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(5 * 10**9)  # sparse
    warned = surplus_warning([str(tmp_path / "a.txt=2")], 10**8, tmp_path / "out")
    assert warned.startswith("all of --data, 5 GB, is tokenised first, though the run reads only about 400 MB of it")
    assert "`uptrain prepare --tokens 100000000`" in warned
    assert surplus_warning([str(tmp_path / "a.txt")], 10**9, tmp_path / "out") is None
    assert surplus_warning(["hub:none-of-this-name"], 1, tmp_path / "out") is None, "it is not downloaded to be counted"
    (tmp_path / "b.txt").write_text("short")
    assert surplus_warning([str(tmp_path / "b.txt")], 1, tmp_path / "out") is None


def test_files_that_are_left_out_are_named(uptrain, tmp_path):
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "A.TXT").write_text("\n".join(SENTENCES * 20))
    (texts / "notes.md").write_text("left out")
    run = ("run", model, "--data", texts, "--out", tmp_path / "run", "--steps", 1, "--lr", 1e-3, "--seq-len", 32)
    result = uptrain(*run, "--global-batch-tokens", 64).succeeded()
    warning = f"Warning: --data: 1 files or folders that hold no texts are left out, such as {texts / 'notes.md'}."
    assert warning in result.err.splitlines()
    assert "1 document," in result.err


def test_runs_and_models_beside_the_texts_are_no_texts(uptrain, tmp_path, monkeypatch):
    """Their metrics.jsonl and merges.txt would be trained on, or refused with advice for texts."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES * 20))
    shutil.copytree(model, texts / "deep/model")
    (texts / "deep/model/merges.jsonl").write_text("no text\n")
    monkeypatch.chdir(texts)
    run = ("run", model, "--data", ".", "--steps", 1, "--lr", 1e-3, "--seq-len", 32, "--global-batch-tokens", 64)
    first = uptrain(*run, "--out", "run").succeeded()
    assert "Warning: --data: 1 files or folders that hold no texts are left out, such as deep/model." in first.err
    assert (texts / "run/metrics.jsonl").is_file()
    again = uptrain(*run, "--out", "run2").succeeded()
    assert "3 files or folders that hold no texts are left out, such as deep/model." in again.err
    (texts / "deep/model/more.jsonl").write_text('{"text": "a"}\n')
    uptrain("evaluate", model, "--data", "deep", "--seq-len", 32).refused(
        "no file of a known format", "(deep/model is a model, a run, a token cache or logits.)"
    )
    evaluated = uptrain("evaluate", model, "--data", ".", "--seq-len", 32, "--json").succeeded()
    assert json.loads(evaluated.out)["targets"] > 0


def test_an_uneven_step_is_refused_before_texts_are_tokenised(uptrain, tmp_path, monkeypatch):
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES * 20))
    monkeypatch.setenv("WORLD_SIZE", "3")
    run = ("run", model, "--data", texts, "--out", tmp_path / "run", "--steps", 1, "--lr", 1e-3, "--seq-len", 32)
    uptrain(*run, "--global-batch-tokens", 64).refused("2 windows cannot be divided evenly among 3 processes")
    assert not (tmp_path / "run.data").exists()


def test_a_run_behind_a_link(uptrain, tmp_path):
    """The data beside the real folder are found after both were moved."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES * 9))
    out = tmp_path / "before/run"
    out.parent.mkdir()
    fixed = ("--seq-len", 32, "--steps", 2, "--lr", 1e-3, "--global-batch-tokens", 256, "--max-minutes", 0)
    uptrain("run", model, "--data", tmp_path / "texts.txt", "--out", out, *fixed).succeeded()
    out.parent.rename(tmp_path / "after")
    (tmp_path / "latest").symlink_to("after/run")
    uptrain("resume", tmp_path / "latest").succeeded()


def test_a_length_on_the_command_line_replaces_that_of_the_file(uptrain, tmp_path, model, texts):
    path = tmp_path / "run.toml"
    path.write_text("tokens = 1_000_000")
    options = ("--data", texts, "--seq-len", 32, "--global-batch-tokens", 256, "--lr", 1e-3, "--max-minutes", 0)
    command = ("run", model, *options, "--config", path, "--out", tmp_path / "run")
    uptrain(*command, "--steps", 2).succeeded()
    assert json.loads((tmp_path / "run/run.json").read_text())["budget"]["steps"] == 2
    path.write_text("tokens = 1_000_000\nalpha = 0.5")
    uptrain(*command[:-1], tmp_path / "other").refused("given: --alpha and --tokens")
