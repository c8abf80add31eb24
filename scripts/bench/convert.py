"""Measure the speed and memory of a conversion against copying and against transformers.

Writes a synthetic sharded bf16 Llama checkpoint of each requested size, and measures alternately in one run:

    ours             convert mha-to-gqa, a quarter of the K/V heads (a whole process, with start-up, fsync and SHA-256)
    no-digest        the same without the SHA-256 of the source files, to show the cost of provenance
    cp               cp -r of the folder
    cp+sync          cp -r, then sync of the file system: the copy is on the disk, as ours is
    cp+sync+sha256   the same, then the SHA-256 of the source's files, a process for each core: all that ours does
                     (by openssl where it is installed: coreutils' sha256sum may not use the processor's instructions)
    usual            from_pretrained, mean-pool the K/V projections, save_pretrained (transformers)

Ratios are medians over --rounds of the ratios within a round, after one warm-up round; the order changes each round.
Memory is the peak of one process: RSS, and RssAnon (anonymous memory, without mapped and cached files), sampled from
/proc.

    python -m scripts.bench.convert --gb 4 8 16 --json docs/bench/convert.json
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from model.common.machine import n_cores
from scripts.bench.llama_checkpoint import TINY_LLAMA, write_random
from scripts.bench.machine import read_bytes, write_rows
from scripts.bench.rounds import in_turns

SHAPE = TINY_LLAMA
GROUPS = SHAPE.heads // 4
NO_DIGEST = """
from convert.output import write_shards
write_shards.file_sha256 = lambda path, stop=None: "0" * 64
from convert.cli import main
main()
"""
USUAL = """
import sys, torch
from transformers import AutoModelForCausalLM
source, out, groups = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, dtype=torch.bfloat16)
config = model.config
for layer in model.model.layers:
    for name in ("k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        w = old.weight.data
        w = w.view(groups, -1, config.head_dim, w.shape[1]).float().mean(1).to(w.dtype).reshape(-1, w.shape[1])
        old.weight = torch.nn.Parameter(w, requires_grad=False)
        old.out_features = w.shape[0]
config.num_key_value_heads = groups
model.save_pretrained(out, max_shard_size="1GB")
"""


def measure(command: list[str]) -> dict[str, float]:
    """Run a command, and return its seconds and its peak anonymous memory in MB."""
    started = time.perf_counter()
    anonymous = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            anonymous = max(anonymous, read_bytes(status, "RssAnon:"))
            time.sleep(0.004)
        seconds = time.perf_counter() - started
        if process.returncode:
            sys.exit(f"{command[0]} failed: {process.communicate()[1].decode()[-2000:]}")
    return {"seconds": seconds, "anon_mb": anonymous / 1e6}


def peak_rss_mb(command: list[str]) -> float:
    """Return the kernel's peak RSS of a command's largest process."""
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    return 1024 * int(subprocess.check_output([sys.executable, "-c", code, *command])) / 1e6  # it prints KiB


def synced_copy(source: Path, out: Path) -> str:
    """Return the shell command that copies a folder to the disk."""
    return f"cp -r {source} {out} && sync -f {out}"


def checksums(folder: Path) -> str:
    """Return the shell command that computes the SHA-256 of a folder's files, with a process for each core."""
    sha256 = "openssl dgst -sha256" if shutil.which("openssl") else "sha256sum"
    return f"find {folder} -type f -print0 | xargs -0 -n 1 -P {n_cores()} {sha256}"


def commands(source: Path, out: Path) -> dict[str, list[str]]:
    arguments = ["mha-to-gqa", str(source), str(out), "--groups", str(GROUPS), "--method", "mean"]
    return {
        "ours": [sys.executable, "-m", "convert", *arguments],
        "no-digest": [sys.executable, "-c", NO_DIGEST, *arguments],
        "cp": ["cp", "-r", str(source), str(out)],
        "cp+sync": ["sh", "-c", synced_copy(source, out)],
        "cp+sync+sha256": ["sh", "-c", f"{synced_copy(source, out)} && {checksums(source)}"],
        "usual": [sys.executable, "-c", USUAL, str(source), str(out), str(GROUPS)],
    }


def bench(source: Path, out: Path, rounds: int, slow_rounds: int) -> dict[str, dict[str, float]]:
    ways = commands(source, out)

    def run(name: str) -> dict[str, float]:
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        return measure(ways[name])

    runs = {name: partial(run, name) for name in ways}
    n_slow = min(slow_rounds, rounds)
    results = in_turns(runs, n_slow)
    del runs["usual"]
    results += in_turns(runs, rounds - n_slow, warm_up=0)
    summary = {}
    for name in ways:
        counted = [each for each in results if name in each]
        if not counted:
            continue
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        seconds = [each[name]["seconds"] for each in counted]
        summary[name] = {
            "seconds": statistics.median(seconds),
            "least_seconds": min(seconds),
            "ours_to_it": statistics.median(each["ours"]["seconds"] / each[name]["seconds"] for each in counted),
            "anon_mb": max(each[name]["anon_mb"] for each in counted),
            "rss_mb": peak_rss_mb(ways[name]),
        }
    shutil.rmtree(out, ignore_errors=True)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[4.0], help="checkpoint sizes in GB")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--slow-rounds", type=int, default=2, help="counted rounds of the usual way")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), help="where to work; needs twice the size")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    results = []
    for gigabytes in options.gb:
        with tempfile.TemporaryDirectory(dir=options.work) as name:
            source, out = Path(name, "source"), Path(name, "out")
            total = write_random(SHAPE.of_size(gigabytes * 1e9), source)
            summary = bench(source, out, options.rounds, options.slow_rounds)
        results.append({"bytes": total, "rounds": options.rounds, "candidates": summary})
        show(total, summary)
        if options.json:  # after each size, so that a stop loses little
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_rows(options.json, results)


def show(total: int, summary: dict[str, dict[str, float]]) -> None:
    print(f"\n{total / 1e9:.2f} GB, {SHAPE.heads} → {GROUPS} K/V heads, {n_cores()} cores")
    print("| | seconds | least | ours ÷ it | peak RSS MB | peak anonymous MB |\n|---|---|---|---|---|---|")
    for name, row in summary.items():
        print(
            f"| {name} | {row['seconds']:.2f} | {row['least_seconds']:.2f} | {row['ours_to_it']:.2f} "
            f"| {row['rss_mb']:.0f} | {row['anon_mb']:.0f} |"
        )


if __name__ == "__main__":
    main()
