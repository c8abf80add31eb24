"""Run `convert` and `uptrain` of this checkout, each on one core unless OMP_NUM_THREADS says otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # Figures are recorded with the commit of this checkout, so its code must run and not an installed version.
    "PYTHONPATH": str(ROOT),
}


class ProgramFailed(click.ClickException):
    """A program failed; the message is one line that ends with the program's last line of output."""


def threads() -> int:
    """Return the number of threads of a program."""
    return int(os.environ.get("OMP_NUM_THREADS", 1))


def run(program: str, *arguments: object) -> str:
    """Run a program, and return its output."""
    words = [program, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads()), **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ProgramFailed(f"{' '.join(words)}: {last_line(done)}")
    return done.stdout


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a failed program wrote; its exit code if it wrote none, as after a kill."""
    return next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")


def train(run_folder: Path, *arguments: object) -> None:
    """Train to the end. Raises ProgramFailed for a training that was stopped early, which itself is not an error."""
    run("uptrain", *arguments)
    state = json.loads((run_folder / "run_state.json").read_text())
    if state["status"] != "finished":
        raise ProgramFailed(f"{run_folder} stopped at step {state['step']}: {state['reason']}.")
