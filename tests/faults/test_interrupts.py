"""Ctrl-C at any moment of the start: one line and exit code 1. A second signal ends a command that cannot stop yet."""

import os
import signal
import subprocess
import sys
import time

import forks
import pytest
import real_runs
from waiting import processes_of, wait_until

LINE = "Error: interrupted; the same command starts again.\n"
SWALLOWS = """
import signal

try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass
"""
"""A module that takes an interrupt for a failed import, as numpy does."""
IN_EXEC = """
import click

from model.common import console


@click.command()
def command():
    exec("import signal; signal.raise_signal(signal.SIGINT)")


console.run(command)
"""


def run_module(folder, *words):
    """Run `python -m`, with the modules of a folder before all others."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, "-m", *words], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("click", ["convert", "--help"]),
        ("numpy", ["convert", "inspect", "SOURCE"]),
        ("click", ["uptrain", "--help"]),
        ("accelerate", ["uptrain", "evaluate", "SOURCE", "--data", "SOURCE/README.md"]),
    ],
)
def test_during_an_import(source, tmp_path, module, words):
    (tmp_path / f"{module}.py").write_text(SWALLOWS)
    words = [word.replace("SOURCE", str(source)) for word in words]
    result = run_module(tmp_path, *words)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", LINE)


def test_in_a_text_that_is_executed(tmp_path):
    """As when a dataclass is made. With `python -m`, CPython would end with the signal."""
    (tmp_path / "in_exec.py").write_text(IN_EXEC)
    result = run_module(tmp_path, "in_exec")
    assert (result.returncode, result.stderr.lstrip("\n")) == (1, LINE)


HELD_WRITE = """
import os, pathlib, time

def wait(descriptor):
    try:
        pathlib.Path("{folder}/writing").touch()
        time.sleep(300)
    except KeyboardInterrupt:
        pathlib.Path("{folder}/interrupted").touch()
        time.sleep(300)

os.fsync = wait
"""
"""Let the first write to the disk take minutes, whatever signal comes."""


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("prepare", "finished work is kept, and the same command continues"),
        ("teach", "finished work is kept, and the same command continues"),
        ("export", "nothing was kept, and the same command starts again"),
    ],
)
def test_a_second_signal_ends_a_command_that_is_held(tmp_path, finished_run, ids, end_afterwards, name, after):
    out, output = tmp_path / "out", tmp_path / "output"
    inputs = real_runs.make_inputs(tmp_path / "inputs")
    arguments = {
        "prepare": ("--data", ids, "--vocab-size", 300, "--seq-len", 8, "--workers", 1, "--out", out),
        "teach": (inputs["parent"], "--data", inputs["data"], "--top-k", 16, "--out", out),
        "export": (finished_run, out),
    }[name]
    process = forks.start_program("uptrain", name, *arguments, output=output, before=HELD_WRITE.format(folder=tmp_path))
    end_afterwards(process)
    wait_until((tmp_path / "writing").exists)
    os.kill(process.pid, signal.SIGTERM)
    wait_until((tmp_path / "interrupted").exists)
    time.sleep(1.2)  # signals within a second are one request
    os.kill(process.pid, signal.SIGTERM)
    (result,) = forks.finish([process], [output])
    assert (result.code, result.err) == (130, f"stopped by a second signal; {after}.\n")
    assert not out.exists()
    wait_until(lambda: not processes_of(process.pid))
