"""Measure how long a layer of Llama-2-7B's shape takes to calibrate, and extrapolate it to the whole model.

Two layers of random weights are merged 32 → 8 by default, for each number of tokens. Times are processor times,
which other load on the machine does not lengthen. The estimate of --dry-run beside them is processor time too. A layer
takes a + b · tokens. This is extrapolated to 32 layers and the default number of tokens, compared with the estimate for
these, and divided by the number of cores.

    OMP_NUM_THREADS=1 python -m scripts.bench.calibrate --tokens 4096 8192
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from convert.calibration import convert_layers, merge_layers
from convert.calibration.refine import refine as refine_layer
from convert.calibration_text.choices import DEFAULT_TOKENS
from convert.estimates import merge as estimate
from convert.planning.merge_plan import MergePlan
from model.checkpoint import Checkpoint
from scripts.bench.llama_checkpoint import LLAMA_2_7B, write_random
from scripts.bench.machine import describe_machine, write_rows

SHAPE = replace(LLAMA_2_7B, layers=2)
N_LAYERS = LLAMA_2_7B.layers
TOKENIZER = Path(__file__).parents[2] / "assets/demo-mha/tokenizer.json"


class Timer:
    """Adds up the processor time of a function's calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *arguments: Any) -> Any:
        started = time.process_time()
        result = self.function(*arguments)
        self.seconds += time.process_time() - started
        self.calls += 1
        return result


def convert(*arguments: object) -> None:
    from convert.cli import main

    with mock.patch.object(sys, "argv", ["convert", "mha-to-gqa", *map(str, arguments)]):
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise


def measure(source: Path, out: Path, tokens: int) -> dict[str, float]:
    """Return the seconds of a layer with and without refining, and their estimate, in processor time."""
    common = arguments(source, out, tokens)
    merge, refine = Timer(merge_layers.merge_layer), Timer(refine_layer)
    patches = mock.patch.object(merge_layers, "merge_layer", merge), mock.patch.object(convert_layers, "refine", refine)
    with patches[0], patches[1]:
        convert(*common)
    per_layer = merge.seconds / merge.calls
    refining = refine.seconds / refine.calls
    return {"refined": per_layer, "closed": per_layer - refining, **estimates(common)}


def arguments(source: Path, out: Path, tokens: int) -> tuple[object, ...]:
    return (source, out, "--groups", 8, "--calibration-tokens", tokens, "--json", "--overwrite")


def estimates(common: tuple[object, ...]) -> dict[str, float]:
    return {"refined_estimate": estimated(*common), "closed_estimate": estimated(*common, "--refine", 0)}


def estimated(*arguments: object) -> float:
    """Return the estimate of --dry-run for a layer, in processor time."""
    seconds: list[float] = []
    original = estimate.merge_seconds

    def kept(checkpoint: Checkpoint, plan: MergePlan) -> float:
        seconds.append(original(checkpoint, plan) / len(plan.conversions))
        return seconds[-1]

    clock = mock.patch.object(time, "perf_counter", time.process_time)
    with clock, mock.patch.object(estimate, "merge_seconds", kept):
        convert(*arguments, "--dry-run")
    return seconds[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs=2, default=[4096, 8192], metavar=("FEW", "MANY"))
    parser.add_argument("--work", type=Path, help="Where the model is written, for 3 GB (a temporary folder).")
    parser.add_argument("--json", type=Path, help="Also write the results here.")
    options = parser.parse_args()
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    print(f"{describe_machine()}, {torch.get_num_threads()} threads", flush=True)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        source = Path(folder) / "source"
        write_random(SHAPE, source, layers_per_shard=1)
        shutil.copyfile(TOKENIZER, source / "tokenizer.json")
        out = Path(folder) / "out"
        few, many = (measure(source, out, tokens) for tokens in options.tokens)
        default = estimates(arguments(source, out, DEFAULT_TOKENS))
    if options.json:
        rows = [{"tokens": tokens, **one} for tokens, one in zip(options.tokens, (few, many), strict=True)]
        rows.append({"tokens": DEFAULT_TOKENS, **default})
        write_rows(options.json, rows)
    for way in ("refined", "closed"):
        for tokens, one in zip(options.tokens, (few, many), strict=True):
            ratio = one[f"{way}_estimate"] / one[way]
            print(f"{way}: {tokens:,} tokens {one[way]:.1f} s a layer, estimate {ratio:.2f} of it")
        slope = (many[way] - few[way]) / (options.tokens[1] - options.tokens[0])
        whole = N_LAYERS * (many[way] + slope * (DEFAULT_TOKENS - options.tokens[1]))
        cores = ", ".join(f"{whole / n / 60:.0f} min on {n}" for n in (1, 2, 16))
        ratio = N_LAYERS * default[f"{way}_estimate"] / whole
        print(f"{way}: {DEFAULT_TOKENS:,} tokens and {N_LAYERS} layers take {cores} cores, estimate {ratio:.2f} of it")


if __name__ == "__main__":
    main()
