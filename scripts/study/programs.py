"""Running `convert` and `uptrain` of this checkout, each on one core."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The commit that a figure is recorded with is this checkout's, whatever is installed.
    "PYTHONPATH": str(ROOT),
}


class ProgramFailed(click.ClickException):
    """A program that did not do its work; the message is one line with its last word."""


def run(program: str, *arguments: object) -> str:
    """Run a program; return what it printed."""
    words = [program, *map(str, arguments)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ProgramFailed(f"{' '.join(words)}: {said[-1]}")
    return done.stdout


def train(run_folder: Path, *arguments: object) -> None:
    """Train to the end. A training that is asked to stop does so in good order, which is not its end."""
    run("uptrain", *arguments)
    state = json.loads((run_folder / "run_state.json").read_text())
    if state["status"] != "finished":
        raise ProgramFailed(f"{run_folder} stopped at step {state['step']}: {state['reason']}.")
