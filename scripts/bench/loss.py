"""The chunked cross-entropy ÷ plain cross-entropy over all logits: time and peak memory, forward and backward.

Times in turns (ABAB …) in this process, medians; memory is each one's peak over what its process held before, in a
process of its own.

    python scripts/bench/loss.py --vocab 32000 --tokens 4096
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.loss import chunked_cross_entropy

HIDDEN = 512


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return chunked_cross_entropy(hidden, weight, labels)[0]


WAYS = {"chunked": chunked, "plain": plain}


def step(way: str, inputs: tuple[Tensor, ...], precision: str) -> float:
    """Return the seconds of one loss and its gradients."""
    hidden, weight, labels = inputs
    hidden.grad = weight.grad = None
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        WAYS[way](hidden, weight, labels).backward()
    return time.perf_counter() - started


def make_inputs(vocab: int, tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,))


def peak_bytes(way: str, vocab: int, tokens: int, precision: str) -> int:
    """Return the peak memory of one step over what the process held before, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", way, "--vocab", str(vocab), "--tokens", str(tokens)]
    return int(subprocess.run([*command, "--precision", precision], check=True, capture_output=True, text=True).stdout)


def report_peak(way: str, vocab: int, tokens: int, precision: str) -> None:
    inputs = make_inputs(vocab, tokens)
    before = high_water_bytes()
    step(way, inputs, precision)
    print(high_water_bytes() - before)


def high_water_bytes() -> int:
    """Return this process's peak memory so far. (getrusage's ru_maxrss would include the parent's, before exec.)"""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


def compare(vocab: int, tokens: int, precision: str, rounds: int) -> dict[str, float]:
    inputs = make_inputs(vocab, tokens)
    pairs = []
    for turn in range(-1, rounds):
        order = list(WAYS)[:: 1 if turn % 2 else -1]
        times = {way: step(way, inputs, precision) for way in order}
        if turn >= 0:
            pairs.append(times)
    peaks = {way: peak_bytes(way, vocab, tokens, precision) for way in WAYS}
    return {
        "time_ratio": statistics.median(p["chunked"] / p["plain"] for p in pairs),
        "memory_ratio": peaks["chunked"] / peaks["plain"],
        **{f"{way}_peak_bytes": peak for way, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        return report_peak(options.peak_of, options.vocab, options.tokens, options.precision[0])
    print("| precision | time, chunked ÷ plain | peak memory, chunked ÷ plain |")
    print("|---|---|---|")
    rows = []
    for precision in options.precision:
        row = compare(options.vocab, options.tokens, precision, options.rounds)
        print(f"| {precision} | {row['time_ratio']:.2f} | {row['memory_ratio']:.2f} |", flush=True)
        rows.append({"vocab": options.vocab, "tokens": options.tokens, "precision": precision, **row})
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
