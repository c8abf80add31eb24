"""Values of a wrong type, or that nothing can have: one line that names them, exit code 2."""

import json

import caches
import pytest
import tiny
import torch
import written_runs
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer

from model import load_model
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError, InputError
from model.decoder.loading import stop_ids
from uptrain.commands.run import command
from uptrain.data.token_cache import TokenCache
from uptrain.models.load import random_student

NOT_FINITE = ("nan", "-nan", "inf", "-inf", "infinity", "1e999")


@pytest.fixture
def model(tmp_path):
    return make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)


# Options


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("option", ["--weight-decay", "--spike-sigma", "--max-minutes", "--lr", "--alpha"])
def test_a_number_that_is_not_finite(uptrain, model, tmp_path, option, value):
    """As an option, and in the file of options."""
    fixed = ("run", model, "--data", tmp_path / "data", "--out", tmp_path / "run")
    uptrain(*fixed, f"{option}={value}").refused(option)
    if value in ("nan", "inf", "-inf"):
        (tmp_path / "run.toml").write_text(f"{option.lstrip('-')} = {value}\n")
        uptrain(*fixed, "--config", tmp_path / "run.toml").refused(option)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    "arguments", [("plan", "m", "--lr"), ("plan", "m", "--alpha"), ("resume", "r", "--max-minutes"),
                  ("extend", "r", "--out", "x", "--alpha"), ("extend", "r", "--out", "x", "--max-minutes")]
)  # fmt: skip
def test_a_number_that_is_not_finite_elsewhere(uptrain, arguments, value):
    *fixed, option = arguments
    uptrain(*fixed, f"{option}={value}").refused(option)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "1e-999", "1e999999999", "9" * 50])
def test_a_weight_that_is_not_finite(uptrain, model, tmp_path, value):
    (tmp_path / "a.txt").write_text("x")
    fixed = ("--tokenizer", model, "--seq-len", 16, "--out", tmp_path / "cache")
    result = uptrain("prepare", "--data", f"{tmp_path}/a.txt={value}", *fixed)
    result.refused("--data")


@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_number_that_is_not_finite_for_generating(generation, tmp_path, option, value):
    generation(tmp_path, "--prompt", "x", f"{option}={value}").refused(f"Invalid value for '{option}'")


def test_every_number_of_a_run_is_finite():
    """A new option of a float cannot forget it."""
    from model.common.command_options import FiniteFloat

    floats = [option for option in command.params if "float" in option.type.name]
    assert len(floats) == 5
    assert all(isinstance(option.type, FiniteFloat) for option in floats)


@pytest.mark.parametrize("count", ["9" * 50, "9" * 5000 + "T", "1e400", "10000000T", "99999999999999999999"])
def test_counts_beyond_all_use(uptrain, model, count):
    uptrain("plan", model, "--lr", 1, "--steps", count).refused("--steps", "give a whole number such as")


# The file of options


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compile = 0", ("compile = 0", "true or false")),
        ('compile = "yes"', ("compile = 'yes'", "true or false")),
        ('teacher = ["a"]', ("teacher = ['a']", "text or a number")),
        ("teacher = {a = 1}", ("teacher = {'a': 1}", "text or a number")),
        ("lr = 1979-05-27", ("lr = datetime.date", "text or a number")),
        ("lr = true", ("lr = True", "text or a number")),
        ("track = [1]", ("track = [1]", "a list of texts")),
        ('data = [["a"]]', ("data = [['a']]", "a list of texts")),
        ("[steps]", ("steps = {}", "text or a number")),
        ('steps = "many"', ("'--steps'", "not a count")),
        ("x = " + "[" * 5000, ("cannot be read",)),
    ],
)
def test_a_file_of_options(uptrain, model, tmp_path, line, words):
    path = tmp_path / "run.toml"
    path.write_text(line + "\n")
    fixed = ("run", model, "--data", tmp_path / "data", "--out", tmp_path / "run")
    uptrain(*fixed, "--config", path).refused("run.toml" if "steps =" not in line else "steps", *words)
    path.write_bytes(b"lr = '\xff'\n")
    uptrain(*fixed, "--config", path).refused("run.toml", "cannot be read")


def test_text_that_no_command_line_can_give(uptrain, model, tmp_path):
    (tmp_path / "run.toml").write_text('teacher = "a\\u0000b"\n')
    fixed = ("run", model, "--data", tmp_path / "data", "--out", tmp_path / "run")
    uptrain(*fixed, "--config", tmp_path / "run.toml").refused("run.toml", "text without the character NUL")


@pytest.mark.parametrize("length", [240, 250, 300])
def test_a_name_that_no_file_can_have(convert, uptrain, model, tmp_path, length):
    """Of 240 it can, but not the staging area's beside it."""
    out = tmp_path / ("x" * length)
    convert("mha-to-mqa", model, out, "--method", "mean").refused("x" * length)
    texts = ("--data", model / "config.json", "--tokenizer", model, "--seq-len", 16)
    uptrain("prepare", *texts, "--out", out).refused()
    data = caches.write_cache(tmp_path / "cache", [[[5] * 40] * 9], 16)
    options = ("--steps", 2, "--lr", 1e-3, "--global-batch-tokens", 32)
    if length > 255:
        uptrain("run", model, "--data", data, "--out", out, *options).refused("x" * length)
    assert not [path for path in tmp_path.iterdir() if "xxx" in path.name]


# A run's folder


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("run_state.json", {"status": "running"}, "no step"),
        ("run_state.json", [], "[] where a JSON object is expected"),
        ("run_state.json", "x", "'x' where a JSON object is expected"),
        ("run_state.json", {"status": "running", "step": 1, "reason": "", "pid": "x"}, "pid = 'x'"),
        ("run_state.json", {"status": "running", "step": 1, "reason": "", "pid": 10**12}, "pid = 1000000000000"),
        ("metrics.jsonl", 5, "5 where a JSON object is expected"),
        ("metrics.jsonl", {"step": 1}, "none of loss, evaluation, event"),
        ("metrics.jsonl", written_runs.step(1) | {"loss": "x"}, "loss = 'x'"),
        ("metrics.jsonl", written_runs.step(1) | {"tokens": None}, "tokens = None"),
        ("metrics.jsonl", written_runs.step(1) | {"tokens_per_s": 0}, "tokens_per_s = 0"),
        ("metrics.jsonl", written_runs.step(-1), "step = -1"),
        ("metrics.jsonl", {"step": 1, "evaluation": 5}, "evaluation = 5"),
        ("metrics.jsonl", {"step": 1, "evaluation": {"targets": 1, "loss": 1, "kl": 1}}, "no evaluation.teacher_loss"),
        ("metrics.jsonl", written_runs.event(0, "started") | {"time": 1e15}, "time = 1000000000000000"),
        ("run.json", {"settings": {"steps": "abc"}}, "settings.steps = 'abc'"),
        ("run.json", {"settings": {"steps": 0}}, "0 steps"),
        ("run.json", {"settings": {"steps": True}}, "settings.steps = True"),
        ("run.json", {"settings": {"lr": float("nan")}}, "settings.lr = nan"),
        ("run.json", {"settings": {"lr": -1.0}}, "learning rate is -1.0"),
        ("run.json", {"settings": {"loss": "x"}}, "loss = 'x'"),
        ("run.json", {"settings": {"schedule": "x"}}, "schedule 'x'"),
        ("run.json", {"settings": {"optimizer": "sgd"}}, "optimizer = 'sgd'"),
        ("run.json", {"settings": {"global_batch": 0}}, "global_batch = 0"),
        ("run.json", {"settings": {"seed": -1}}, "seed = -1"),
        ("run.json", {"settings": {"track": "wandb"}}, "settings.track = 'wandb', which is not a list"),
        ("run.json", {"settings": {"colour": 1}}, "unknown key 'settings.colour'"),
        ("run.json", {"budget": {"tokens": None}}, "budget.tokens = None"),
        ("run.json", {"budget": {"global_batch_tokens": 0}}, "budget.global_batch_tokens = 0"),
        ("run.json", {"identities": {"teacher": "0"}}, "identities.teacher matches no setting"),
        ("run.json", {"parent": {"run": 5, "step": 1}}, "parent.run = 5"),
        ("run.json", {"versions": []}, "versions = []"),
    ],
)
def test_a_run_s_files(uptrain, tmp_path, name, change, words):
    run = written_runs.write_run(
        tmp_path / "run", [written_runs.step(1)], {"status": "finished", "step": 1, "reason": "", "pid": 1}
    )
    path = run / name
    if name == "run.json":
        parsed = json.loads(path.read_text())
        for key, inside in change.items():
            parsed[key] = {**parsed[key], **inside} if isinstance(parsed[key], dict) and inside else inside
        change = parsed
    path.write_text(json.dumps(change) + "\n")
    uptrain("status", run).refused(f"{name}", "damaged", words)
    uptrain("report", run).refused(f"{name}", "damaged", words)
    if name == "run.json":
        for command_line in (("resume", run), ("extend", run, "--out", tmp_path / "out", "--steps", 99)):
            uptrain(*command_line).refused(f"{name}", "damaged", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_len": "16"}, "seq_len = '16'"),
        ({"seq_len": 10**30}, "seq_len = 1000"),
        ({"dtype": "object"}, "dtype = 'object'"),
        ({"dtype": 5}, "dtype = 5"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"n_tokens": 3}, "n_tokens does not belong"),
        ({"shards": []}, "no tokens"),
        ({"shards": {}}, "shards = {}, which is not a list"),
        ({"shards": [5]}, "shards[0] = 5"),
        ({"sources": [{"path": 1}]}, "sources[0].path = 1"),
        ({"tokens": "../x"}, "shards[0] names '../x'"),
        ({"documents": "/etc/passwd"}, "shards[0] names '/etc/passwd'"),
        ({"tokens": "sub/x"}, "shards[0] names 'sub/x'"),
        ({"tokens": None}, "shards[0].tokens = None"),
        ({"n_documents": -1}, "shards[0].n_documents = -1"),
    ],
)
def test_a_token_cache_s_manifest(tmp_path, change, words):
    """Also file names that lead out of its folder."""
    path = caches.write_cache(tmp_path / "cache", [[[5] * 40] * 9], 16) / "manifest.json"
    manifest = json.loads(path.read_text())
    inside = manifest["shards"][0] if next(iter(change)) in ("tokens", "documents", "n_documents") else manifest
    inside.update(change)
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError) as error:
        TokenCache.open(path.parent)
    assert words in str(error.value)
    assert "prepare the cache again" in str(error.value)


# Checkpoints


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_tensor_that_no_layer_can_be_run_with(convert, model, tmp_path, dtype):
    """By the weights alone it is copied; a method with a text, as the default, says why it cannot."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tiny.tensors(model)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    options = ("--groups", 2, "--calibration-tokens", 1024)
    convert("mha-to-gqa", model, tmp_path / "out", "--method", "fit", *options).refused(name, "cannot be run with")
    assert not (tmp_path / "out").exists()
    convert("mha-to-gqa", model, tmp_path / "out", *options).refused("the default merge is not possible: ", name)
    convert("mha-to-gqa", model, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    with pytest.raises(CheckpointError, match=f"{name} as .* cannot be run with"):
        load_model(model)


def test_a_scalar_where_a_norm_belongs(model):
    tensors = tiny.tensors(model)
    tensors["model.norm.weight"] = torch.ones(())
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight as F32 of shape \(\)"):
        load_model(model)


@pytest.mark.parametrize("value", [10**9, 10**12, 10**30])
@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "intermediate_size", "hidden_size"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_sizes_that_no_memory_holds(tmp_path, family, key, value):
    """Nothing of such a size is made, by our code or by transformers."""
    folder = tiny.save(tiny.build(family), tmp_path / family)
    tiny.edit_config(folder, **{key: value})
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


def test_a_model_from_nothing_for_which_there_is_no_memory(model):
    tiny.edit_config(model, vocab_size=1 << 28, hidden_size=1 << 20, head_dim=4)
    with pytest.raises(InputError, match=r"describes a model of .* TB, which does not fit into memory"):
        random_student(model, 0)


@pytest.mark.parametrize("value", ["0.02", -1, float("nan"), True, [], None])
def test_how_weights_are_drawn(model, value):
    tiny.edit_config(model, initializer_range=value)
    with pytest.raises(InputError, match="initializer_range = "):
        random_student(model, 0)


@pytest.mark.parametrize("value", ["2", 2.5, -1, True, [2, "x"], {"a": 1}, [[2]], 10**30])
def test_the_end_of_texts(model, value):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with open_checkpoint(model) as checkpoint, pytest.raises(CheckpointError, match=r"eos_token_id = "):
        stop_ids(checkpoint)
    for text in ("[]", "{", "", "[" * 10000):
        (model / "generation_config.json").write_text(text)
        with open_checkpoint(model) as checkpoint, pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            stop_ids(checkpoint)


@pytest.mark.parametrize("value", ["64", 1, -5, 2.5, True, [64], 10**30])
def test_the_model_s_context(convert, uptrain, model, tmp_path, value):
    tiny.edit_config(model, max_position_embeddings=value)
    uptrain("plan", model, "--steps", 9, "--lr", 1, "--global-batch-tokens", 64).refused("max_position_embeddings = ")
    convert("mha-to-gqa", model, tmp_path / "out", "--groups", 2, "--method", "fit").refused("max_position_embeddings")


def test_a_prompt_in_another_encoding(generation, tmp_path):
    """Python reads bytes that are not UTF-8 as half characters."""
    generation(tmp_path, "--prompt", "caf\udce9").refused("the prompt is not valid UTF-8")


def test_experts_that_torch_cannot_multiply(convert, tmp_path):
    """Rows of 30 float32 numbers are no multiple of 16 bytes, which torch's product of many experts needs."""
    parent = tiny.build("mixtral", intermediate_size=30, vocab_size=300)
    source = make_tokenizer(tiny.save(parent, tmp_path / "in"), 300)
    options = ("--groups", 2, "--calibration-tokens", 1024)
    convert("mha-to-gqa", source, tmp_path / "out", *options).refused("transformers cannot run layer 0 on a text: ")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
