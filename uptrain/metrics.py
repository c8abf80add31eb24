"""`metrics.jsonl`: a line per step, evaluation and event, written by the main process.

    {"step": 7, "loss": …, "learning_rate": …, "grad_norm": …, "tokens": …, "windows": …, "tokens_per_s": …}
    {"step": 8, "evaluation": {…}}
    {"step": 8, "event": "resumed", …}

`step` counts finished steps. When a run goes on from an earlier step, what came after it is cut away.
"""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Metrics:
    """The file of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Record) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Cut away what a run going on from `step` will write anew: later steps, and evaluations from there on."""
        kept = [r for r in read_metrics(self.path) if "event" in r or r["step"] < step + ("evaluation" not in r)]
        temporary = self.path.with_suffix(".tmp")
        write_metrics(temporary, kept)
        temporary.replace(self.path)


def read_metrics(path: Path) -> list[Record]:
    """Return all whole lines; a kill may have cut the last."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_metrics(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
