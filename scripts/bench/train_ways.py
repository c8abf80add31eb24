"""Measure tokens/s of the ways to distil, as ratios: what is trained, and how the teacher's predictions are provided.

    python -m scripts.bench.train_ways --json docs/bench/train_ways.json

attention ÷ all       train attention only ÷ train everything, with a teacher
shared ÷ apart        student and teacher share the frozen parameters ÷ they do not; attention only
logits ÷ live         a teacher's logits from before the run ÷ the teacher itself; attention only

Each way is a run of a few steps in this process. The runs alternate, and the median of the steps' tokens/s is compared,
without the first step of each run.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers.utils import logging

from scripts.bench.machine import Row, write_rows
from scripts.bench.rounds import in_turns
from scripts.bench.training_inputs import (
    ACCUMULATION,
    BUDGET,
    MICRO_BATCH,
    SEQ_LEN,
    SHAPE,
    make_cache,
    make_documents,
    make_model,
    merge_heads,
    reset,
    settings,
)
from uptrain.runs.start_and_resume import start
from uptrain.teach import TeachOptions, teach

RATIOS = {
    "attention ÷ all": ("attention", "all"),
    "shared ÷ apart": ("attention", "apart"),
    "logits ÷ live": ("logits", "attention"),
}


def ways_of(work: Path, steps: int, precision: str) -> dict[str, Callable[[Path], list[float]]]:
    """Return the ways by name. Each trains into a folder, and returns the tokens/s of its steps."""
    parent = make_model(work / "parent", SHAPE["num_attention_heads"], torch.bfloat16)
    model = merge_heads(parent, work / "model")
    cache = make_cache(work / "cache", make_documents("full", SEQ_LEN * MICRO_BATCH * ACCUMULATION * steps))
    teach(TeachOptions(parent, cache, work / "logits", 64))

    def way(**changes: Any) -> Callable[[Path], list[float]]:
        given = settings(model, cache, steps, precision, loss="distill", **changes)

        def run(out: Path) -> list[float]:
            speeds: list[float] = []
            reset()
            start(given, BUDGET, model, out, math.inf, lambda record: speeds.extend(speed_in(record)))
            return speeds[1:]

        return run

    def apart(out: Path) -> list[float]:
        with sharing_nothing():
            return ways["attention"](out)

    live = {"teacher": str(parent)}
    ways = {
        "all": way(**live),
        "attention": way(trainable="attention", **live),
        "apart": apart,
        "logits": way(trainable="attention", teacher_logits=str(work / "logits")),
    }
    return ways


def speed_in(record: dict[str, Any]) -> list[float]:
    return [record["tokens_per_s"]] if "tokens_per_s" in record else []


def sharing_nothing() -> "mock._patch[Any]":
    """Let student and teacher hold what they could share twice."""
    return mock.patch("uptrain.runs.build.equal_tensors", lambda *given: [])


def compare(work: Path, steps: int, rounds: int, precision: str) -> list[Row]:
    """Run all ways in turns; return a row for each ratio."""
    ways = ways_of(work, steps, precision)

    def run(way: Callable[[Path], list[float]]) -> list[float]:
        return way(Path(tempfile.mkdtemp(dir=work)) / "run")

    runs = in_turns({name: partial(run, way) for name, way in ways.items()}, rounds, warm_up=0)
    medians = {name: statistics.median(speed for each in runs for speed in each[name]) for name in ways}
    return [
        {"ratio_of": name, "precision": precision, "ratio": medians[a] / medians[b],
         "tokens_per_s": [medians[a], medians[b]]}
        for name, (a, b) in RATIOS.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of a run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        rows = compare(Path(name), options.steps, options.rounds, options.precision)
    for row in rows:
        print(json.dumps(row, ensure_ascii=False), flush=True)
    if options.json:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
