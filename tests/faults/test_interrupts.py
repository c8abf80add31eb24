"""Ctrl-C at any moment of the start: one line and exit code 1."""

import os
import subprocess
import sys

import pytest

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
