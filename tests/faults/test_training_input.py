"""What does not fit together is refused in one line, exit code 2, before anything is made or changed."""

import json
import re
import shutil

import caches
import pytest
import real_runs
import tiny
from fault_injection import Faults, run
from faulty_runs import error_of, succeed
from safetensors.torch import load_file, save_file
from tiny_tokenizers import SENTENCES, make_tokenizer

from uptrain.runs.run_folder import locked

BEYOND = (
    "{other_vocabulary} holds the id 301, but the model knows only those below 257; prepare the data with the model's "
    "own tokenizer, from texts without the tokens that were added to it."
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    ids = [[[1, 2, 3] * 40, [299, 300, 301]]]
    return {
        **real_runs.make_inputs(folder),
        "other_vocabulary": caches.write_cache(folder / "other_vocabulary", ids, 32, 302),
        "tokenised": caches.write_cache(folder / "tokenised", ids, 32, 302, tokenizer="0" * 64),
        "experts": tiny.save(tiny.build("mixtral", vocab_size=real_runs.VOCAB), folder / "experts"),
        "other teacher": tiny.save(tiny.build(vocab_size=67), folder / "other-teacher"),
        "with tokenizer": make_tokenizer(
            tiny.save(tiny.build(vocab_size=302, num_key_value_heads=2), folder / "with-tokenizer"), 300
        ),
        "truncated": truncated(shutil.copytree(folder / "data", folder / "truncated") / "tokens-00001.bin"),
        "broken": truncated(shutil.copytree(folder / "model", folder / "broken") / "model.safetensors"),
    }


def truncated(path):
    """Cut the last 10 bytes off a file; return its folder."""
    path.write_bytes(path.read_bytes()[:-10])
    return path.parent


REFUSED = {
    "ids beyond the vocabulary": (
        {"data": "other_vocabulary"}, (), BEYOND,
    ),
    "held-out ids beyond the vocabulary": (
        {}, ("--eval-data", "{other_vocabulary}"),
        BEYOND,
    ),
    "tokenizer of another model": (
        {"model": "with tokenizer", "data": "tokenised"}, (),
        "{tokenised} was made with another tokenizer than that of {with tokenizer}; prepare it with --tokenizer "
        "{with tokenizer}.",
    ),
    "truncated cache": (
        {"data": "truncated"}, (),
        "{truncated}/tokens-00001.bin has 448 bytes where the manifest says 458; prepare the cache again.",
    ),
    "no cache": ({}, ("--eval-data", "{model}"), None),
    "truncated weights": ({"model": "broken"}, (), None),
    "experts, which transformers holds under other names": (
        {"model": "experts"}, (),
        "--trainable all: transformers holds the experts of model_type 'mixtral' under other names than the files do, "
        "so other programs could not open the result; use --trainable attention.",
    ),
    "teacher of another vocabulary": (
        {}, ("--teacher", "{other teacher}"),
        "the teacher {other teacher} has 67 tokens, the student 257; distillation needs the same vocabulary.",
    ),
    "evaluations of nothing": (
        {}, ("--eval-every", "3"), "--eval-every needs held-out data to evaluate on; name them with --eval-data.",
    ),
    "no teacher there": ({}, ("--teacher", "{model}/nowhere"), None),
}  # fmt: skip
"""What else the run is made of, more options, and the message; None where tests elsewhere hold its words."""


@pytest.mark.parametrize("case", REFUSED)
def test_refused(inputs, tmp_path, case):
    changes, more, message = REFUSED[case]
    inputs = {**inputs, **{name: inputs[other] for name, other in changes.items()}}
    options = [option.format(**inputs) for option in more]
    results = run(*real_runs.arguments(inputs, tmp_path / "run", *options), folder=tmp_path)
    error = error_of(results, 2)
    assert not results[0].out
    if message is not None:
        assert error == message.format(**inputs)
    assert_nothing_made(tmp_path)


def assert_nothing_made(folder):
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("output-")) == []


def test_one_line_from_all_processes(inputs, tmp_path):
    """Seven windows, say, cannot be divided evenly among two."""
    arguments = real_runs.arguments(inputs, tmp_path / "run", "--global-batch-tokens", 7 * 32)
    error = error_of(run(*arguments, folder=tmp_path, processes=2), 2)
    assert error == (
        "a global batch of 7 windows cannot be divided evenly among 2 processes; possible numbers are 1, 7. "
        "Change --global-batch-tokens or the number of processes."
    )
    assert_nothing_made(tmp_path)


@pytest.mark.parametrize("command", ["run", "evaluate", "extend"])
def test_processes_that_no_launcher_started(inputs, runs, tmp_path, uptrain, monkeypatch, command):
    arguments = {
        "run": real_runs.arguments(inputs, tmp_path / "out"),
        "evaluate": ("evaluate", inputs["model"], "--data", inputs["data"]),
        "extend": ("extend", runs.expected(), "--out", tmp_path / "out", "--steps", 20),
    }[command]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    result = uptrain(*arguments)
    result.refused(
        "WORLD_SIZE=2 is set, but not RANK, MASTER_ADDR, MASTER_PORT; start many processes with torchrun or "
        "`accelerate launch`, or one with WORLD_SIZE unset."
    )
    assert_nothing_made(tmp_path)


def test_sharding_that_accelerate_drops(inputs, tmp_path):
    """As it does on CPUs, without a word."""
    arguments = real_runs.arguments(inputs, tmp_path / "run")
    results = run(*arguments, folder=tmp_path, processes=2, sharded=True, faults=Faults(drops_sharding=True))
    assert error_of(results, 2).startswith("sharding (FSDP) was requested, but accelerate dropped it on this device")
    assert_nothing_made(tmp_path)


def test_resuming_with_other_data(inputs, tmp_path):
    """Cut short, or another cache in its place: then the run stays as it is."""
    out, data = tmp_path / "run", shutil.copytree(inputs["data"], tmp_path / "data")
    arguments = real_runs.arguments({**inputs, "data": data}, out, "--max-minutes", 0)
    succeed(arguments, tmp_path)
    before = tiny.snapshot(out)
    truncated(data / "tokens-00000.bin")
    assert f"{data}/tokens-00000.bin has " in error_of(run("resume", out, folder=tmp_path), 2)
    shutil.rmtree(data)
    shutil.copytree(inputs["held_out"], data)
    error = error_of(run("resume", out, folder=tmp_path), 2)
    assert error.startswith(f"{data} holds other data than when the run began (sha256 ")
    assert error.endswith("); restore that cache, or start a new run.")
    assert tiny.snapshot(out) == before


@pytest.mark.parametrize(("name", "said"), [
    ("parent", "another teacher"), ("model", "another model"), ("held_out", "other held-out data"),
])  # fmt: skip
def test_resuming_with_another_input(inputs, tmp_path, name, said):
    """Other weights of the same shapes under the same name; the model counts until there is a checkpoint."""
    out, place = tmp_path / "run", shutil.copytree(inputs[name], tmp_path / name)
    given = {**inputs, name: place}
    more = ("--eval-data", given["held_out"], "--max-minutes", 0)
    succeed(real_runs.arguments(given, out, *more, loss="distill"), tmp_path)
    if name == "model":
        shutil.rmtree(out / "checkpoints")
    before = tiny.snapshot(out)
    shutil.rmtree(place)
    if name == "held_out":
        shutil.copytree(inputs["data"], place)
    else:
        heads = {"model": {"num_key_value_heads": 2}, "parent": {}}[name]
        tiny.save(tiny.build(vocab_size=real_runs.VOCAB, seed=7, **heads), place)
    error = error_of(run("resume", out, folder=tmp_path), 2)
    assert error == f"{place} is {said} than when the run began; restore it, or start a new run."
    assert tiny.snapshot(out) == before


def test_the_model_is_not_needed_once_there_is_a_checkpoint(inputs, tmp_path):
    out, model = tmp_path / "run", shutil.copytree(inputs["model"], tmp_path / "model")
    succeed((*real_runs.arguments({**inputs, "model": model}, out), "--max-minutes", 0), tmp_path)
    shutil.rmtree(model)
    succeed(("resume", out), tmp_path)


def test_where_something_is_already(inputs, tmp_path):
    out = tmp_path / "run"
    succeed(real_runs.arguments(inputs, out, "--max-minutes", 0), tmp_path)
    before = tiny.snapshot(out)
    error = error_of(run(*real_runs.arguments(inputs, out), folder=tmp_path), 2)
    assert error == f"{out} exists already; `uptrain resume {out}` continues it."
    assert tiny.snapshot(out) == before
    error = error_of(run(*real_runs.arguments(inputs, inputs["data"]), folder=tmp_path), 2)
    assert error == f"{inputs['data']} exists already; choose another --out."


def test_out_below_a_file(inputs, tmp_path):
    (tmp_path / "file").write_text("x")
    error = error_of(run(*real_runs.arguments(inputs, tmp_path / "file/run"), folder=tmp_path), 2)
    assert error == f"{tmp_path / 'file'} cannot be written to; choose another --out."


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_that_lacks_a_tensor(inputs, tmp_path, sharded):
    """Sharded, only the main process reads it, and the other must hear of it."""
    model = tmp_path / "model"
    shutil.copytree(inputs["model"], model)
    tensors = load_file(model / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    out = tmp_path / "run"
    results = run(*real_runs.arguments({**inputs, "model": model}, out), folder=tmp_path, processes=2, sharded=sharded)
    assert error_of(results, 2) == f"{model} lacks the tensor model.norm.weight."
    assert not out.exists()


def test_resuming_what_is_no_run(inputs, tmp_path):
    out = tmp_path / "run"
    assert error_of(run("resume", out, folder=tmp_path), 2).startswith(f"{out} does not exist; `uptrain run …")
    out.mkdir()
    assert error_of(run("resume", out, folder=tmp_path), 2).startswith(f"{out} is not a run: it has no run.json;")
    (out / "run.json").write_text(json.dumps({"settings": {}}))
    assert error_of(run("resume", out, folder=tmp_path), 2).startswith(f"{out}/run.json is damaged, or of another")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resuming_where_another_trains(inputs, tmp_path, processes):
    out = tmp_path / "run"
    succeed(real_runs.arguments(inputs, out, "--max-minutes", 0), tmp_path)
    before = tiny.snapshot(out)
    with locked(out):
        error = error_of(run("resume", out, folder=tmp_path, processes=processes), 2)
    assert re.fullmatch(rf"{out} is being trained by process \d+ on \S+; see `uptrain status {out}`\.", error)
    assert tiny.snapshot(out) == before
    succeed(("resume", out), tmp_path, processes)


def test_resuming_where_a_folder_or_a_file_is_in_the_way(inputs, tmp_path):
    """It is refused before models are built."""
    out = tmp_path / "run"
    succeed(real_runs.arguments(inputs, out, "--max-minutes", 0), tmp_path)
    for name, words in (
        ("run_state.json", "is a folder, not a file"), ("metrics.jsonl", "is a folder, not a file"),
        ("checkpoints", "is not a folder"),
    ):  # fmt: skip
        (out / name).rename(tmp_path / name)
        (out / name).mkdir() if name != "checkpoints" else (out / name).touch()
        assert error_of(run("resume", out, folder=tmp_path), 2) == f"{out}/{name} {words}; move it away."
        (out / name).rmdir() if name != "checkpoints" else (out / name).unlink()
        (tmp_path / name).rename(out / name)
    succeed(("resume", out, "--max-minutes", 0), tmp_path)


# Models that transformers opens


BROKEN = {
    "null": ("gemma", {"num_key_value_heads": None}, "Field 'num_key_value_heads' expected int, got NoneType"),
    "text": ("olmo2", {"hidden_size": "32"}, "Field 'hidden_size' expected int, got str"),
    "no heads": ("olmo2", {"num_attention_heads": 0}, "ZeroDivisionError"),
    "activation": ("olmo2", {"hidden_act": "nonsense"}, "KeyError: 'nonsense'"),
    "RoPE": ("olmo2", {"rope_parameters": {"rope_type": "linear"}}, "Missing required keys in `rope_parameters`"),
    "dtype": ("olmo2", {"dtype": "torch.bfloat16"}, "AttributeError: module 'torch' has no attribute"),
    "vocabulary": ("olmo2", {"vocab_size": -3}, "RuntimeError: Trying to create tensor with negative dimension"),
    "padding": ("olmo2", {"pad_token_id": 999}, "AssertionError: Padding_idx must be within num_embeddings"),
    "layers": ("gemma2", {"layer_types": ["full_attention"]}, "`num_hidden_layers` (2) must be equal"),
}


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    return caches.write_cache(tmp_path_factory.mktemp("windows") / "cache", [[[1, 2, 3] * 20]], 16, 67)


@pytest.mark.parametrize("case", BROKEN)
def test_configs_that_transformers_stops_at(uptrain, windows, tmp_path, case):
    family, changes, words = BROKEN[case]
    folder = tiny.save(tiny.build(family), tmp_path / "model")
    tiny.edit_config(folder, **changes)
    result = uptrain("evaluate", folder, "--data", windows)
    result.refused(words, "config.json")


def test_weights_that_are_not_the_config_s(uptrain, windows, tmp_path):
    folder = tiny.save(tiny.build("olmo2"), tmp_path / "model")
    tiny.edit_config(folder, intermediate_size=41)
    result = uptrain("evaluate", folder, "--data", windows)
    assert result.code == 2
    last = result.err.splitlines()[-1]  # after a progress bar of transformers'
    assert f"Error: {folder}: mismatched keys: ('model.layers.0.mlp.down_proj.weight'" in last


def test_a_model_that_is_no_language_model(uptrain, windows, tmp_path):
    folder = tiny.save(tiny.build("llava"), tmp_path / "model")
    tiny.edit_config(folder, model_type="clip")
    uptrain("evaluate", folder, "--data", windows).refused("no causal language model of model_type 'clip'")


def test_a_parent_that_transformers_stops_at(uptrain, windows, tmp_path):
    student = tiny.save(tiny.build(), tmp_path / "student")
    parent = tiny.save(tiny.build("gemma"), tmp_path / "parent")
    tiny.edit_config(parent, num_key_value_heads=None)
    uptrain("evaluate", student, "--data", windows, "--teacher", parent).refused(str(parent), "num_key_value_heads")


@pytest.mark.parametrize("option", ["--data", "--eval-data"])
def test_nothing_to_predict(uptrain, inputs, tmp_path, option):
    empty = caches.write_cache(tmp_path / "empty", [[[1], [2], [3]] * 40], 32, real_runs.VOCAB)
    more = (option, empty) if option == "--eval-data" else ()
    changed = inputs if more else {**inputs, "data": empty}
    uptrain(*real_runs.arguments(changed, tmp_path / "run", *more)).refused(f"{option} {empty} has nothing to predict")
    assert not (tmp_path / "run").exists()


def test_a_missing_model_or_text_is_named(uptrain, inputs, tmp_path):
    run = ("run", inputs["model"], "--data", inputs["data"], "--out", tmp_path / "run", "--steps", 1, "--lr", 1)
    run += ("--global-batch-tokens", 256)
    nowhere = tmp_path / "nowhere"
    uptrain(*run, "--eval-data", nowhere).refused(f"--eval-data {nowhere}: no such file or folder")
    uptrain(*run, "--teacher", nowhere).refused(f"{nowhere}: no such file or folder; give a model's folder")
    uptrain("evaluate", nowhere, "--data", inputs["data"]).refused(f"{nowhere}: no such file or folder")
    two = uptrain(*run, "--data", inputs["held_out"], "--seq-len", 32)
    two.refused(f"--data {inputs['data']} is a token cache, which stands alone")
    weighed = uptrain(*(f"{part}=2" if part == inputs["data"] else part for part in run))
    weighed.refused(f"is a token cache, which has no weight; give --data {inputs['data']}")


def test_a_teacher_with_another_tokenizer(uptrain, tmp_path):
    """Of the same size, with two tokens exchanged."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300, num_key_value_heads=2), tmp_path / "model"), 300)
    teacher = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "teacher"), 300)
    content = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES * 20))
    run = ("run", model, "--data", texts, "--teacher", teacher, "--steps", 1, "--lr", 1e-3, "--seq-len", 32)
    run += ("--global-batch-tokens", 64)
    uptrain(*run, "--out", tmp_path / "same").succeeded()
    (teacher / "tokenizer.json").write_text(json.dumps(content))
    words = f"the teacher {teacher} has other ids than the student for 2 tokens, such as 'a'"
    uptrain(*run, "--out", tmp_path / "other").refused(words)
    assert not (tmp_path / "other.data").exists()
    evaluate = ("evaluate", model, "--data", texts, "--teacher", teacher, "--seq-len", 32)
    uptrain(*evaluate).refused(words)


@pytest.mark.parametrize(("n_renamed", "refused"), [(10, False), (200, True)])
def test_a_teacher_whose_tokens_have_other_names(uptrain, tmp_path, n_renamed, refused):
    """A few reserved tokens may be renamed."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300, num_key_value_heads=2), tmp_path / "model"), 300)
    teacher = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "teacher"), 300)
    content = json.loads((teacher / "tokenizer.json").read_text())
    content["model"]["vocab"] = {
        f"@{i}@" if 20 <= i < 20 + n_renamed else token: i for token, i in content["model"]["vocab"].items()
    }
    content["model"]["merges"] = []
    (teacher / "tokenizer.json").write_text(json.dumps(content))
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES * 20))
    result = uptrain("evaluate", model, "--data", texts, "--teacher", teacher, "--seq-len", 32)
    if refused:
        result.refused(f"the teacher {teacher} has other tokens than the student for 200 of ", "such as 20 (", "'@20@'")
    else:
        result.succeeded()


@pytest.mark.parametrize("command", ["prepare", "export"])
def test_commands_for_one_process(inputs, tmp_path, uptrain, monkeypatch, command):
    arguments = {
        "prepare": ("--data", inputs["data"], "--vocab-size", 300, "--seq-len", 8, "--out", tmp_path / "out"),
        "export": (tmp_path / "run", tmp_path / "out"),
    }[command]
    monkeypatch.setenv("WORLD_SIZE", "2")
    uptrain(command, *arguments).refused(f"`uptrain {command}` is for one process; start it without a launcher.")
    assert_nothing_made(tmp_path)


def test_a_tokenizer_that_cannot_be_compared_is_told(uptrain, inputs, tmp_path):
    student = shutil.copytree(inputs["model"], tmp_path / "student")
    make_tokenizer(student)
    arguments = real_runs.arguments({**inputs, "model": student}, tmp_path / "run", loss="distill", steps=4)
    ran = uptrain(*arguments)
    assert "the same tokenizer is not checked" in ran.err


def test_an_empty_option_is_no_default(uptrain, inputs, tmp_path, monkeypatch):
    """As a variable of the shell that is not set gives it. A folder's data are not meant, even from inside a cache."""
    monkeypatch.chdir(inputs["data"])
    out = tmp_path / "run"
    words = "the path is empty. Is a variable of the shell unset?"
    uptrain(*real_runs.arguments(inputs, out, "--eval-data", "")).refused(f"--eval-data: {words}")
    uptrain(*real_runs.arguments({**inputs, "data": ""}, out, "--seq-len", 32)).refused(f"--data: {words}")
    assert not out.exists()


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a"}])
def test_ranks_that_no_launcher_has_set(uptrain, inputs, tmp_path, monkeypatch, variables):
    """A cluster may set them in each process; errors are printed all the same."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    uptrain("status", tmp_path / "none").refused("none does not exist")
    if "WORLD_SIZE" in variables:
        uptrain(*real_runs.arguments(inputs, tmp_path / "run")).refused("WORLD_SIZE=2 is set, but not LOCAL_RANK")


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5"])
def test_a_world_size_that_is_no_number(uptrain, inputs, tmp_path, monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    words = f"the variable WORLD_SIZE is {value!r}, not a number of processes"
    uptrain(*real_runs.arguments(inputs, tmp_path / "run")).refused(words)
    uptrain("evaluate", inputs["model"], "--data", inputs["data"]).refused(words)
