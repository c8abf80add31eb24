"""What does not fit together is refused in one line, exit code 2, before anything is made or changed."""

import json
import shutil

import caches
import pytest
import tiny
import training
from faulty_runs import error_of, succeed
from faulty_training import Faults, run
from tokenizers_ import make_tokenizer

from uptrain.run_folder import locked

OTHER = "prepare the data with the model's own tokenizer."


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    ids = [[[1, 2, 3] * 40, [299, 300, 301]]]
    return {
        **training.make_inputs(folder),
        "foreign": caches.write_cache(folder / "foreign", ids, 32, 302),
        "tokenised": caches.write_cache(folder / "tokenised", ids, 32, 302, tokenizer="0" * 64),
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
        {"data": "foreign"}, (), "{foreign} was made with a tokenizer of 302 tokens, but the model knows 257; " + OTHER,
    ),
    "held-out ids beyond the vocabulary": (
        {}, ("--eval-data", "{foreign}"),
        "{foreign} was made with a tokenizer of 302 tokens, but the model knows 257; " + OTHER,
    ),
    "tokenizer of another model": (
        {"model": "with tokenizer", "data": "tokenised"}, (),
        "{tokenised} was made with another tokenizer than that of {with tokenizer}; prepare it with --tokenizer "
        "{with tokenizer}.",
    ),
    "truncated cache": (
        {"data": "truncated"}, (),
        "{truncated}/tokens-00001.bin has 448 bytes where the manifest says 458; prepare the cache anew.",
    ),
    "no cache": ({}, ("--eval-data", "{model}"), None),
    "truncated weights": ({"model": "broken"}, (), None),
    "teacher of another vocabulary": (
        {}, ("--teacher", "{other teacher}"),
        "the teacher {other teacher} has 67 tokens, the student 257; distillation needs the same vocabulary.",
    ),
    "no teacher there": ({}, ("--teacher", "{model}/nowhere"), None),
}  # fmt: skip
"""What else the run is made of, more options, and the message; None where tests elsewhere hold its words."""


@pytest.mark.parametrize("case", REFUSED)
def test_refused(inputs, tmp_path, case):
    changes, more, message = REFUSED[case]
    inputs = {**inputs, **{name: inputs[other] for name, other in changes.items()}}
    options = [option.format(**inputs) for option in more]
    results = run(*training.arguments(inputs, tmp_path / "run", *options), folder=tmp_path)
    error = error_of(results, 2)
    assert not results[0].out
    if message is not None:
        assert error == message.format(**inputs)
    assert_nothing_made(tmp_path)


def assert_nothing_made(folder):
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("output-")) == []


def test_one_line_from_all_processes(inputs, tmp_path):
    """Seven windows, say, cannot be shared evenly by two."""
    arguments = training.arguments(inputs, tmp_path / "run", "--global-batch-tokens", 7 * 32)
    error = error_of(run(*arguments, folder=tmp_path, processes=2), 2)
    assert error == (
        "a global batch of 7 windows cannot be shared evenly by 2 processes; it can by 1, 7. "
        "Change --global-batch-tokens or the number of processes."
    )
    assert_nothing_made(tmp_path)


@pytest.mark.parametrize("command", ["run", "evaluate", "extend"])
def test_processes_that_no_launcher_started(inputs, runs, tmp_path, uptrain, monkeypatch, command):
    arguments = {
        "run": training.arguments(inputs, tmp_path / "out"),
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
    arguments = training.arguments(inputs, tmp_path / "run")
    results = run(*arguments, folder=tmp_path, processes=2, sharded=True, faults=Faults(drops_sharding=True))
    assert error_of(results, 2).startswith("sharding (FSDP) was asked for, but accelerate dropped it on this device")
    assert_nothing_made(tmp_path)


def test_resuming_with_other_data(inputs, tmp_path):
    """Cut short, or another cache in its place: then the run stays as it is."""
    out, data = tmp_path / "run", shutil.copytree(inputs["data"], tmp_path / "data")
    arguments = training.arguments({**inputs, "data": data}, out, "--max-minutes", 0)
    succeed(arguments, tmp_path)
    before = tiny.snapshot(out)
    truncated(data / "tokens-00000.bin")
    assert f"{data}/tokens-00000.bin has " in error_of(run("resume", out, folder=tmp_path), 2)
    shutil.rmtree(data)
    shutil.copytree(inputs["held_out"], data)
    error = error_of(run("resume", out, folder=tmp_path), 2)
    assert error.startswith(f"{data} holds other data than when the run began (sha256 ")
    assert error.endswith("); bring that cache back, or start a new run.")
    assert tiny.snapshot(out) == before


def test_where_something_is_already(inputs, tmp_path):
    out = tmp_path / "run"
    succeed(training.arguments(inputs, out, "--max-minutes", 0), tmp_path)
    before = tiny.snapshot(out)
    error = error_of(run(*training.arguments(inputs, out), folder=tmp_path), 2)
    assert error == f"{out} exists already; `uptrain resume {out}` goes on with it."
    assert tiny.snapshot(out) == before
    error = error_of(run(*training.arguments(inputs, inputs["data"]), folder=tmp_path), 2)
    assert error == f"{inputs['data']} exists already; choose another --out."


def test_resuming_what_is_no_run(inputs, tmp_path):
    out = tmp_path / "run"
    assert error_of(run("resume", out, folder=tmp_path), 2).startswith(f"{out} is not a run: it has no run.json;")
    out.mkdir()
    (out / "run.json").write_text(json.dumps({"settings": {}}))
    assert error_of(run("resume", out, folder=tmp_path), 2).startswith(f"{out}/run.json is damaged, or of another")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resuming_where_another_trains(inputs, tmp_path, processes):
    out = tmp_path / "run"
    succeed(training.arguments(inputs, out, "--max-minutes", 0), tmp_path)
    before = tiny.snapshot(out)
    with locked(out):
        error = error_of(run("resume", out, folder=tmp_path, processes=processes), 2)
    assert error == f"{out} is being trained by another process; see `uptrain status {out}`."
    assert tiny.snapshot(out) == before
    succeed(("resume", out), tmp_path, processes)
