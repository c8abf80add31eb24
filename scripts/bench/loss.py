"""Measure the chunked losses ÷ the plain losses over all logits: time and peak memory, forward and backward.

`next-token` is cross-entropy, `distill` the KL divergence from a teacher of the same width, including its logits.

Times are medians of alternating steps (ABAB …) in this process. Memory is the increase of a new process's peak.

    python -m scripts.bench.loss --vocab 32000 --tokens 4096
"""

import argparse
import itertools
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.chunk_size import chunk_size
from model.decoder.losses import chunked_cross_entropy, chunked_loss
from scripts.bench.machine import read_bytes, write_rows
from scripts.bench.rounds import in_turns, median_ratio
from uptrain.training.losses.kl import kl_of_chunks

HIDDEN = 512

# Letters: N tokens, M hidden size, V vocabulary.


def plain_cross_entropy(
    student_NM: Tensor, weight_VM: Tensor, teacher_NM: Tensor, teacher_weight_VM: Tensor, labels_N: Tensor
) -> Tensor:
    return F.cross_entropy(F.linear(student_NM, weight_VM).float(), labels_N, reduction="sum")


def our_cross_entropy(
    student_NM: Tensor, weight_VM: Tensor, teacher_NM: Tensor, teacher_weight_VM: Tensor, labels_N: Tensor
) -> Tensor:
    return chunked_cross_entropy(student_NM, weight_VM, labels_N)[0]


def plain_kl(
    student_NM: Tensor, weight_VM: Tensor, teacher_NM: Tensor, teacher_weight_VM: Tensor, labels_N: Tensor
) -> Tensor:
    log_student_NV = F.linear(student_NM, weight_VM).float().log_softmax(dim=1)
    log_teacher_NV = F.linear(teacher_NM, teacher_weight_VM).float().log_softmax(dim=1)
    return F.kl_div(log_student_NV, log_teacher_NV, reduction="sum", log_target=True)


def our_kl(
    student_NM: Tensor, weight_VM: Tensor, teacher_NM: Tensor, teacher_weight_VM: Tensor, labels_N: Tensor
) -> Tensor:
    has_target_N = torch.ones(len(student_NM), dtype=torch.bool)
    return chunked_kl(student_NM, weight_VM, teacher_NM, teacher_weight_VM, has_target_N)


def chunked_kl(
    student_NM: Tensor, weight_VM: Tensor, teacher_NM: Tensor, teacher_weight_VM: Tensor, has_target_N: Tensor
) -> Tensor:
    """Return the loss `distill` of hidden states: Σ Σ_v p_teacher (log p_teacher − log p_student) in float32.

    The first sum is over the tokens where `has_target_N`, and p = softmax(hidden · weightᵀ). The teacher's hidden size
    may differ. Gradients flow to the student only.
    """
    size = chunk_size(len(student_NM), student_NM.shape[1], len(weight_VM))
    kl = kl_of_chunks(teacher_NM, teacher_weight_VM, size)
    return chunked_loss(student_NM, weight_VM, has_target_N, kl)


LOSSES = {
    "next-token": {"chunked": our_cross_entropy, "plain": plain_cross_entropy},
    "distill": {"chunked": our_kl, "plain": plain_kl},
}
WAYS = ("chunked", "plain")


def step(loss: str, way: str, inputs: tuple[Tensor, ...], precision: str) -> float:
    """Return the seconds of one loss and its gradients."""
    for tensor in inputs:
        tensor.grad = None
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        LOSSES[loss][way](*inputs).backward()
    return time.perf_counter() - started


def make_inputs(vocab: int, tokens: int) -> tuple[Tensor, ...]:
    """Return hidden states and heads of a student and a teacher, and labels, in the order of the functions above."""
    torch.manual_seed(0)
    student_NM, teacher_NM = torch.randn(2, tokens, HIDDEN)
    weight_VM, teacher_weight_VM = torch.randn(2, vocab, HIDDEN).mul_(0.02)
    labels_N = torch.randint(0, vocab, (tokens,))
    return student_NM.requires_grad_(), weight_VM.requires_grad_(), teacher_NM, teacher_weight_VM, labels_N


def peak_bytes(loss: str, way: str, vocab: int, tokens: int, precision: str) -> int:
    """Return the increase of peak memory in one step, measured in a new process."""
    command = [sys.executable, "-m", "scripts.bench.loss", "--peak-of", way, "--losses", loss, "--vocab", str(vocab)]
    command += ["--tokens", str(tokens), "--precision", precision]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report_peak(loss: str, way: str, vocab: int, tokens: int, precision: str) -> None:
    inputs = make_inputs(vocab, tokens)
    before = high_water_bytes()
    step(loss, way, inputs, precision)
    print(high_water_bytes() - before)


def high_water_bytes() -> int:
    """Return this process's peak memory so far. (getrusage's ru_maxrss would include the parent's before exec.)"""
    return read_bytes(Path("/proc/self/status"), "VmHWM:")


def compare(loss: str, vocab: int, tokens: int, precision: str, rounds: int) -> dict[str, float]:
    inputs = make_inputs(vocab, tokens)
    pairs = in_turns({way: partial(step, loss, way, inputs, precision) for way in WAYS}, rounds)
    peaks = {way: peak_bytes(loss, way, vocab, tokens, precision) for way in WAYS}
    return {
        "time_ratio": median_ratio(pairs, "chunked", "plain"),
        "memory_ratio": peaks["chunked"] / peaks["plain"],
        **{f"{way}_peak_bytes": peak for way, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        return report_peak(options.losses[0], options.peak_of, options.vocab, options.tokens, options.precision[0])
    print("| loss | precision | time, chunked ÷ plain | peak memory, chunked ÷ plain |")
    print("|---|---|---|---|")
    rows = []
    for loss, precision in itertools.product(options.losses, options.precision):
        row = compare(loss, options.vocab, options.tokens, precision, options.rounds)
        print(f"| {loss} | {precision} | {row['time_ratio']:.2f} | {row['memory_ratio']:.2f} |", flush=True)
        rows.append({"loss": loss, "vocab": options.vocab, "tokens": options.tokens, "precision": precision, **row})
    if options.json:
        write_rows(options.json, rows)
    return None


if __name__ == "__main__":
    main()
