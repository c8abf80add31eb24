"""Measure a model by tasks of EleutherAI's lm-evaluation-harness on local texts (lm_eval_tasks.py).

    python -m scripts.study.on_tasks MODEL --texts valid.jsonl      prints JSON: each task's measures

The harness is a program of its own, `lm_eval` (`pip install lm_eval[hf]`), which may be in another environment.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from scripts.study.lm_eval_tasks import TASKS, write_tasks
from scripts.study.programs import last_line

FOLDER = click.Path(exists=True, path_type=Path)
BATCH = 4


@click.command(help=__doc__)
@click.argument("model", type=FOLDER)
@click.option("--texts", type=FOLDER, required=True, help="JSON lines with a key text, or a folder of .txt.")
@click.option("--passages", type=click.IntRange(min=1), default=200, show_default=True, help="How many of each text.")
@click.option("--program", default="lm_eval", show_default=True, help="The harness.")
def main(model: Path, texts: Path, passages: int, program: str) -> None:
    if shutil.which(program) is None:
        raise click.ClickException(
            f"{program} is not a program in PATH; install it with pip install lm_eval[hf], or give its path with "
            "--program."
        )
    with tempfile.TemporaryDirectory() as temporary:
        tasks, out = Path(temporary, "tasks"), Path(temporary, "out")
        write_tasks(texts, tasks, passages)
        command: list[str | Path] = [
            program, "run", "--model", "hf", "--model_args", f"pretrained={model.resolve()},dtype=float32",
            "--device", "cpu", "--batch_size", str(BATCH), "--include_path", tasks, "--tasks", ",".join(TASKS),
            "--output_path", out,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{program}: {last_line(done)}")
        (path,) = out.rglob("results_*.json")
        print(json.dumps(measures(json.loads(path.read_text())["results"])))


def measures(results: dict[str, dict[str, object]]) -> dict[str, dict[str, float]]:
    """Return each task's measures and their standard errors, without the harness's names of filters."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in sorted(results[task].items())
            if name.endswith(",none") and isinstance(value, int | float)
        }
        for task in TASKS
    }


if __name__ == "__main__":
    main()
