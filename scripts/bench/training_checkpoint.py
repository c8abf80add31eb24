"""Measure resuming late ÷ early, and saving a training checkpoint ÷ `torch.save`.

    python -m scripts.bench.training_checkpoint --json docs/bench/training_checkpoint.json

resume   time of `uptrain resume` to the end of its first step, from step 100 000 ÷ from step 1, in new processes
save     time of a training checkpoint, checked and on the disk ÷ `torch.save` of the same tensors, and with fsync

Both sides alternate, and medians are compared.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.utils import logging

from scripts.bench.machine import Row, write_rows
from scripts.bench.rounds import in_turns, median_ratio, medians, seconds
from scripts.bench.training_inputs import BUDGET, SEQ_LEN, make_cache, make_documents, make_model, reset, settings
from uptrain.checkpoints.store import CheckpointStore
from uptrain.runs.start_and_resume import start

FAR = 100_000


def compare_resume(model: Path, work: Path, rounds: int) -> Row:
    """Resume a run from step 1, and from step 100 000 of a run with as many lines of metrics."""
    cache = make_cache(work / "cache-resume", make_documents("full", SEQ_LEN * 64))
    near, far = work / "near", work / "far"
    reset()
    plan = settings(model, cache, 2 * FAR, "fp32", save_every=1, micro_batch=1, global_batch=1)
    budget = replace(BUDGET, global_batch_tokens=SEQ_LEN, steps=2 * FAR)
    start(plan, budget, model, near, time.monotonic(), lambda r: None)
    shutil.copytree(near, far)
    move(far, FAR)
    ways = {run.name: partial(seconds_to_first_step, run, work / "copy") for run in (near, far)}
    pairs = in_turns(ways, rounds, warm_up=0)
    both = medians(pairs)
    ratio = median_ratio(pairs, "far", "near")
    return {"part": "resume", "near_s": both["near"], "far_s": both["far"], "ratio": ratio}


def move(run: Path, step: int) -> None:
    """Edit a run after step 1 to look like the run after `step`."""
    source, target = run / "checkpoints/step-00000001", run / f"checkpoints/step-{step:08d}"
    source.rename(target)
    state = json.loads((target / "state.json").read_text()) | {"step": step, "tokens": step * SEQ_LEN}
    text = json.dumps(state).encode()
    (target / "state.json").write_bytes(text)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "crc32": [zlib.crc32(text)]}
    (target / "manifest.json").write_text(json.dumps(manifest))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (record,) = [line for line in lines if "loss" in line]
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(record | {"step": i + 1}) + "\n" for i in range(step))


def seconds_to_first_step(run: Path, copy: Path) -> float:
    """Resume a copy of a run in a new process, and return the time until it has finished one step."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    size = (copy / "metrics.jsonl").stat().st_size
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "uptrain", "resume", str(copy)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            if has_step(copy / "metrics.jsonl", size):
                return time.perf_counter() - started
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    raise RuntimeError(f"{copy} ended by itself")


def has_step(path: Path, size: int) -> bool:
    """Return whether a step was written after the line of the resume event."""
    if path.stat().st_size <= size:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        tail = file.read()
    return b'"loss"' in tail.partition(b'"resumed"')[2]


def compare_save(work: Path, rounds: int) -> Row:
    """Save a model of 94 M parameters with AdamW states, 1.13 GB."""
    from accelerate import Accelerator

    from model.decoder.config import read_llama_config
    from model.decoder.llama import LlamaForCausalLM as Ours

    reset()
    config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=12,
                         num_key_value_heads=4, vocab_size=8192, tie_word_embeddings=True)  # fmt: skip
    model = Ours(read_llama_config(config.to_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    checkpoints = CheckpointStore(
        work / "checkpoints", Accelerator(cpu=True), keep_last=1, save_every=1, check_lock=lambda: None
    )
    checkpoints.clean_up()
    step = 0

    def ours() -> None:
        nonlocal step
        step += 1
        checkpoints.save(model, optimizer, {"step": step})

    def plain(sync: bool) -> None:
        path = work / "plain.pt"
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def timed(save: Callable[[], None]) -> float:
        os.sync()
        return seconds(save)

    saves = {"ours": ours, "plain": lambda: plain(False), "plain_fsync": lambda: plain(True)}
    times = in_turns({name: partial(timed, save) for name, save in saves.items()}, rounds)
    row: Row = {**medians(times)}
    row["ratio"] = median_ratio(times, "ours", "plain")
    row["ratio_fsync"] = median_ratio(times, "ours", "plain_fsync")
    size = sum(f.stat().st_size for f in (work / "checkpoints").rglob("*") if f.is_file())
    return {"part": "save", "bytes": size, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("resume", "save"), default=["resume", "save"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work; needs 6 GB")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        for part in options.parts:
            if part == "resume":
                rows.append(compare_resume(make_model(work / "model"), work, options.rounds))
            else:
                rows.append(compare_save(work, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
