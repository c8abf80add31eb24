"""Fixtures that several tests of faults share."""

import json
import os
import signal
from contextlib import suppress

import pytest
import real_runs
from commands import MEAN


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Return a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    inputs = real_runs.make_inputs(folder)
    real_runs.drive([{"arguments": real_runs.arguments(inputs, folder / "run", steps=4)}], on_cpu=True)
    return folder / "run"


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1, 2, 3, i]}) + "\n" for i in range(50)))
    return path


@pytest.fixture
def end_afterwards():
    """Return a function that takes a process; after the test, what still runs of its process group is killed."""
    processes = []
    yield processes.append
    for process in processes:
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def writers(convert, uptrain, source, finished_run, ids, tmp_path):
    """Return the commands that make a folder OUT, by name: a function to run each, and where its last work is done."""
    out = tmp_path / "out"
    return {
        "convert": (lambda: convert("mha-to-gqa", source, out, *MEAN), "convert.conversion._write_side_files"),
        "export": (lambda: uptrain("export", finished_run, out), "uptrain.export.export._write_files"),
        "prepare": (
            lambda: uptrain("prepare", "--data", ids, "--vocab-size", 300, "--seq-len", 8, "--out", out),
            "uptrain.data.prepare.publish._write",
        ),
    }


@pytest.fixture
def refuse_source(convert, source, tmp_path, nothing_left_behind):
    """Convert the source, or what is at `path`, and check the refusal: one line with all words, and nothing left."""

    def run(*words, groups=2, options=(), path=None, out=None):
        arguments = (path or source, out or tmp_path / "out", "--groups", groups, *options)
        return convert("mha-to-gqa", "--method", "mean", *arguments).refused(*words)

    return run


@pytest.fixture
def prepare(uptrain, tmp_path, tokenizer):
    """Prepare tmp_path/out; with `ids=True`, from data that is tokenised already."""

    def run(*data, ids=False, options=()):
        arguments = [word for path in data for word in ("--data", path)]
        arguments += ["--vocab-size", 300] if ids else ["--tokenizer", tokenizer]
        return uptrain("prepare", *arguments, "--seq-len", 8, "--out", tmp_path / "out", "--workers", 1, *options)

    return run
