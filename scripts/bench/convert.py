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
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from model.common.machine import n_cores
from scripts.bench.machine import facts, read_bytes

HEADS, HEAD_DIM, LAYER_SHARD = 32, 64, 3
HIDDEN, MLP, VOCAB = HEADS * HEAD_DIM, 5632, 32000
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP + 2 * HIDDEN)
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


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """Write a Llama of about this size, with a few layers per shard, and return the bytes written."""
    n_layers = max(1, round((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / LAYER_BYTES))
    shards = [list(range(i, min(i + LAYER_SHARD, n_layers))) for i in range(0, n_layers, LAYER_SHARD)]
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    total = 0
    for number, layers in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        if number == 0:
            shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
            tensors = {n: random_bf16(rng, s) for n, s in {**shapes, "model.norm.weight": (HIDDEN,)}.items()}
        for layer in layers:
            tensors |= {f"model.layers.{layer}.{n}.weight": random_bf16(rng, s) for n, s in layer_shapes().items()}
        save_bf16(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": n_layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "vocab_size": VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return total


def layer_shapes() -> dict[str, tuple[int, ...]]:
    square = dict.fromkeys([f"self_attn.{n}_proj" for n in "qkvo"], (HIDDEN, HIDDEN))
    mlp = {"mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
    return {**square, **mlp, "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return small numbers as bfloat16 bits: random signs and mantissas around 2^-6."""
    bits = rng.integers(0, 1 << 16, size=shape, dtype=np.uint16)
    return (bits & 0x80FF) | np.uint16(0x3C00)


def save_bf16(tensors: dict[str, np.ndarray], path: Path) -> None:
    import ml_dtypes

    save_file({n: t.view(ml_dtypes.bfloat16) for n, t in tensors.items()}, path, metadata={"format": "pt"})


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
    arguments = ["mha-to-gqa", str(source), str(out), "--groups", str(HEADS // 4), "--method", "mean"]
    return {
        "ours": [sys.executable, "-m", "convert", *arguments],
        "no-digest": [sys.executable, "-c", NO_DIGEST, *arguments],
        "cp": ["cp", "-r", str(source), str(out)],
        "cp+sync": ["sh", "-c", synced_copy(source, out)],
        "cp+sync+sha256": ["sh", "-c", f"{synced_copy(source, out)} && {checksums(source)}"],
        "usual": [sys.executable, "-c", USUAL, str(source), str(out), str(HEADS // 4)],
    }


def bench(source: Path, out: Path, rounds: int, slow_rounds: int) -> dict[str, dict[str, float]]:
    rows: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds + 1):
        names = list(commands(source, out))
        random.Random(turn).shuffle(names)  # in a fixed order, each would always follow the same one
        for name in names:
            if name == "usual" and turn > slow_rounds:
                continue
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            row = measure(commands(source, out)[name])
            if turn:
                rows.setdefault(name, []).append(row)
    ours, summary = [row["seconds"] for row in rows["ours"]], {}
    for name, runs in rows.items():
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        seconds = [row["seconds"] for row in runs]
        summary[name] = {
            "seconds": statistics.median(seconds),
            "least_seconds": min(seconds),
            "ours_to_it": statistics.median(own / its for own, its in zip(ours, seconds, strict=False)),
            "anon_mb": max(row["anon_mb"] for row in runs),
            "rss_mb": peak_rss_mb(commands(source, out)[name]),
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
            total = make_checkpoint(source, gigabytes)
            summary = bench(source, out, options.rounds, options.slow_rounds)
        results.append({"bytes": total, "rounds": options.rounds, "machine": facts(), "candidates": summary})
        show(total, summary)
        if options.json:  # after each size, so that a stop loses little
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=2) + "\n")


def show(total: int, summary: dict[str, dict[str, float]]) -> None:
    print(f"\n{total / 1e9:.2f} GB, {HEADS} → {HEADS // 4} K/V heads, {n_cores()} cores")
    print("| | seconds | least | ours ÷ it | peak RSS MB | peak anonymous MB |\n|---|---|---|---|---|---|")
    for name, row in summary.items():
        print(
            f"| {name} | {row['seconds']:.2f} | {row['least_seconds']:.2f} | {row['ours_to_it']:.2f} "
            f"| {row['rss_mb']:.0f} | {row['anon_mb']:.0f} |"
        )


if __name__ == "__main__":
    main()
