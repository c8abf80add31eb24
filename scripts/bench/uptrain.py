"""Uptraining ÷ peers: whole training loops, litgpt's step, saving and resuming. Ratios within this run.

    pip install --no-deps litgpt lightning lightning-utilities torchmetrics jsonargparse     for --parts litgpt
    python scripts/bench/uptrain.py --json docs/bench/uptrain.json

trainer   tokens/s of `uptrain run` ÷ of the Hugging Face Trainer: same weights, same full windows, micro-batch,
          accumulation and precision, with everything a step does on either side (clipping, schedule, logging)
padding   the same with documents of half a window on average: ours packs them, the Trainer pads to a batch's longest
litgpt    tokens/s of our training step ÷ litgpt's: forward, backward, clipping, AdamW (fused for both)
resume    time to the first step's end of `uptrain resume` from step 100 000 ÷ from step 1, in fresh processes
save      time of a training checkpoint, checked and on the disk ÷ `torch.save` of the same tensors, and with fsync

Building a cache is measured by scripts/bench/prepare.py. Loops take their steps in turns, and their tokens ÷ time are
compared; everything else alternates, and medians are compared.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder, in which this very file would be taken for the package

import accelerate
import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from uptrain.data.cache import MANIFEST, CacheShard, Manifest
from uptrain.run import start
from uptrain.settings import Settings
from uptrain.training_checkpoint import Checkpoints

SEQ_LEN, MICRO_BATCH, ACCUMULATION, VOCAB = 512, 4, 2, 16384
SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
FAR = 100_000
Row = dict[str, Any]


def make_model(folder: Path) -> Path:
    """Write a Llama of 27 M parameters with 2 K/V heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPE, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_documents(kind: str, n_tokens: int) -> list[list[int]]:
    """Return random documents: all a window long, or of 2 to 512 tokens."""
    rng = np.random.default_rng(0)
    mean = SEQ_LEN if kind == "full" else SEQ_LEN // 2
    lengths = [SEQ_LEN if kind == "full" else rng.integers(2, SEQ_LEN + 1) for _ in range(n_tokens // mean)]
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def make_cache(folder: Path, documents: list[list[int]]) -> Path:
    """Write documents as `uptrain prepare` would."""
    folder.mkdir()
    lengths = [len(d) for d in documents]
    tokens = np.concatenate([np.array(d, "<u2") for d in documents])
    starts = np.cumsum([0, *lengths[:-1]]).astype("<i8")
    names, sums = ("tokens-00000.bin", "documents-00000.bin"), []
    for name, values in zip(names, (tokens, starts), strict=True):
        (folder / name).write_bytes(values.tobytes())
        sums.append(hashlib.sha256(values.tobytes()).hexdigest())
    shard = CacheShard(*names, len(tokens), len(starts), *sums)
    (folder / MANIFEST).write_bytes(Manifest(SEQ_LEN, "uint16", VOCAB, "", (shard,)).text())
    return folder


def settings(model: Path, data: Path, steps: int, precision: str, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": str(model), "data": str(data), "loss": "next-token", "steps": steps,
        "global_batch": MICRO_BATCH * ACCUMULATION, "micro_batch": MICRO_BATCH, "schedule": "constant", "lr": 1e-4,
        "warmup_steps": 0, "decay_fraction": 0.0, "optimizer": "adamw", "weight_decay": 0.0, "trainable": "all",
        "precision": precision, "seed": 0, "save_every": 10 * steps, "keep_last": 1, "eval_every": 10 * steps,
    }  # fmt: skip
    return Settings(**values | changes)


BUDGET = {"global_batch_tokens": MICRO_BATCH * ACCUMULATION * SEQ_LEN, "original_tokens": None, "alpha": None}


class Turns:
    """Lets two loops in two threads take their steps in turns, so that a slow moment of the machine meets both."""

    def __init__(self) -> None:
        self.steps: dict[str, list[tuple[float, int]]] = {"ours": [], "theirs": []}
        """Each step's seconds and tokens."""
        self._changed = threading.Condition()
        self._whose, self._ended = "ours", set[str]()
        self._started = 0.0
        self._tokens = {"ours": 0, "theirs": 0}

    def begin(self, who: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._whose == who or self._ended)
            self._started = time.perf_counter()

    def step_ended(self, who: str, tokens: int) -> None:
        """Note a step, and wait for the other's."""
        self.steps[who].append((time.perf_counter() - self._started, tokens - self._tokens[who]))
        self._tokens[who] = tokens
        self._pass_on(who)
        self.begin(who)

    def end(self, who: str) -> None:
        self._ended.add(who)
        self._pass_on(who)

    def _pass_on(self, who: str) -> None:
        with self._changed:
            self._whose = "theirs" if who == "ours" else "ours"
            self._changed.notify_all()


def our_loop(model: Path, data: Path, steps: int, precision: str, work: Path, turns: Turns) -> None:
    def show(record: Row) -> None:
        if "loss" in record:
            turns.step_ended("ours", record["tokens"])
        elif record.get("event") == "started":
            turns.begin("ours")

    start(settings(model, data, steps, precision), BUDGET, model, work / "ours", math.inf, show)


class Documents(Dataset[dict[str, list[int]]]):
    """Documents as the Trainer wants them."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.documents[index]}


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Make a batch as DataCollatorForLanguageModeling does: to the length of its longest document."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        ids = row["input_ids"]
        rest = longest - len(ids)
        filled["input_ids"].append(ids + [0] * rest)
        filled["attention_mask"].append([1] * len(ids) + [0] * rest)
        filled["labels"].append(ids + [-100] * rest)
    return {name: torch.tensor(values) for name, values in filled.items()}


class Clock(TrainerCallback):
    """Tells when steps begin and end, and how many real tokens had been trained on."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.n_tokens = 0

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        self._turns.begin("theirs")

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self._turns.step_ended("theirs", self.n_tokens)


def their_loop(
    model: Path, documents: list[list[int]], steps: int, precision: str, work: Path, turns: Turns
) -> None:  # fmt: skip
    """The same by the Hugging Face Trainer."""
    clock = Clock(turns)

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        clock.n_tokens += sum(len(row["input_ids"]) for row in rows)
        return pad(rows)

    arguments = TrainingArguments(
        output_dir=str(work / "theirs"), max_steps=steps, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION, learning_rate=1e-4, lr_scheduler_type="constant", max_grad_norm=1.0,
        bf16=precision == "bf16", use_cpu=not torch.cuda.is_available(), logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM.from_pretrained(model, dtype=torch.float32),
        arguments, train_dataset=Documents(documents), data_collator=collate, callbacks=[clock],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def reset() -> None:
    """Let the next loop choose its own precision."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def speed(steps: list[tuple[float, int]]) -> float:
    """Return tokens/s: all tokens ÷ all time, each step's time limited to three times the median."""
    typical = statistics.median(seconds for seconds, _ in steps)
    return sum(tokens for _, tokens in steps) / sum(min(seconds, 3 * typical) for seconds, _ in steps)


def compare_loops(kind: str, precision: str, model: Path, work: Path, steps: int) -> Row:
    """Train with both, a step each in turn."""
    reset()
    documents = make_documents(kind, SEQ_LEN * MICRO_BATCH * ACCUMULATION * 64)
    place = work / f"{kind}-{precision}"
    place.mkdir()
    cache, turns = make_cache(place / "cache", documents), Turns()
    loops: dict[str, Callable[[], None]] = {
        "ours": lambda: our_loop(model, cache, steps, precision, place, turns),
        "theirs": lambda: their_loop(model, documents, steps, precision, place, turns),
    }
    accelerate.Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16" if precision == "bf16" else "no")

    def work_of(who: str) -> None:
        try:
            loops[who]()
        finally:
            turns.end(who)

    threads = [threading.Thread(target=work_of, args=(who,)) for who in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(found) == steps for found in turns.steps.values())
    ours, theirs = (speed(turns.steps[who][2:]) for who in ("ours", "theirs"))
    return {
        "part": "trainer" if kind == "full" else "padding", "precision": precision, "steps": steps,
        "ours_tokens_per_s": ours, "theirs_tokens_per_s": theirs, "ratio": ours / theirs,
    }  # fmt: skip


def compare_litgpt(precision: str, rounds: int) -> Row:
    """Training steps of the same shape in turns; ours on full windows, as litgpt has them."""
    from lightning import Fabric
    from litgpt.model import GPT
    from litgpt.model import Config as LitConfig
    from litgpt.utils import chunked_cross_entropy

    from model.llama import LlamaForCausalLM as Ours
    from model.llama_config import read_llama_config

    hidden, layers, heads = SHAPE["hidden_size"], SHAPE["num_hidden_layers"], SHAPE["num_attention_heads"]
    lit_config = LitConfig(
        block_size=SEQ_LEN, padded_vocab_size=VOCAB, vocab_size=VOCAB, n_layer=layers, n_head=heads, n_query_groups=2,
        n_embd=hidden, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=SHAPE["intermediate_size"],
    )  # fmt: skip
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bf16" else "32-true")
    torch.manual_seed(0)
    lit_model = GPT(lit_config)
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=VOCAB, tie_word_embeddings=False)
    ours = Ours(read_llama_config(config.to_dict())).train()
    assert sum(p.numel() for p in lit_model.parameters()) == sum(p.numel() for p in ours.parameters())
    optimizer = torch.optim.AdamW(lit_model.parameters(), lr=1e-4, fused=True)
    lit, lit_optimizer = fabric.setup(lit_model, optimizer)
    our_optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ_LEN + 1))

    def lit_step() -> None:
        logits = lit(ids[:, :-1].contiguous())
        fabric.backward(chunked_cross_entropy(logits, ids[:, 1:].contiguous(), chunk_size=0))
        fabric.clip_gradients(lit, lit_optimizer, max_norm=1.0)
        lit_optimizer.step()
        lit_optimizer.zero_grad()

    def our_step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss_sum, n_valid = ours(ids[:, :-1], ids[:, :-1])
        (loss_sum / n_valid).backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        our_optimizer.step()
        our_optimizer.zero_grad()

    pairs = []
    for turn in range(rounds + 2):
        ways = [("ours", our_step), ("theirs", lit_step)]
        pairs.append({name: seconds(way) for name, way in (ways if turn % 2 else ways[::-1])})
    ratios = [p["theirs"] / p["ours"] for p in pairs[2:]]
    return {"part": "litgpt", "precision": precision, "ratio": statistics.median(ratios)}


def compare_resume(model: Path, work: Path, rounds: int) -> Row:
    """Resume a run from step 1, and from step 100 000 of a run with as many lines of metrics."""
    cache = make_cache(work / "cache-resume", make_documents("full", SEQ_LEN * 64))
    near, far = work / "near", work / "far"
    reset()
    plan = settings(model, cache, 2 * FAR, "fp32", save_every=1, micro_batch=1, global_batch=1)
    start(
        plan,
        {**BUDGET, "global_batch_tokens": SEQ_LEN, "steps": 2 * FAR},
        model,
        near,
        time.monotonic(),
        lambda r: None,
    )
    shutil.copytree(near, far)
    move(far, FAR)
    pairs = []
    for turn in range(rounds):
        names = (near, far) if turn % 2 else (far, near)
        pairs.append({run.name: seconds_to_first_step(run, work / "copy") for run in names})
    return {
        "part": "resume",
        "near_s": statistics.median(p["near"] for p in pairs),
        "far_s": statistics.median(p["far"] for p in pairs),
        "ratio": statistics.median(p["far"] / p["near"] for p in pairs),
    }


def move(run: Path, step: int) -> None:
    """Make of a run after step 1 the same after `step`."""
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
    """Resume a copy of a run in a new process; return the time until it has finished one step."""
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
    """Say whether a step was written after the line that a run is resumed."""
    if path.stat().st_size <= size:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        tail = file.read()
    return b'"loss"' in tail.partition(b'"resumed"')[2]


def compare_save(work: Path, rounds: int) -> Row:
    """Save a model of 113 M parameters with AdamW states, 1.36 GB."""
    from accelerate import Accelerator

    from model.llama import LlamaForCausalLM as Ours
    from model.llama_config import read_llama_config

    reset()
    config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=12,
                         num_key_value_heads=4, vocab_size=8192, tie_word_embeddings=True)  # fmt: skip
    model = Ours(read_llama_config(config.to_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    checkpoints = Checkpoints(work / "checkpoints", Accelerator(cpu=True), keep_last=1)
    checkpoints.sweep()
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

    ways: list[tuple[str, Callable[[], None]]] = [
        ("ours", ours), ("plain", lambda: plain(False)), ("plain_fsync", lambda: plain(True))
    ]  # fmt: skip
    times = []
    for turn in range(rounds + 1):
        os.sync()
        times.append({name: seconds(way) for name, way in ways[turn % 3 :] + ways[: turn % 3]})
    row: Row = {name: statistics.median(t[name] for t in times[1:]) for name, _ in ways}
    row["ratio"] = statistics.median(t["ours"] / t["plain"] for t in times[1:])
    row["ratio_fsync"] = statistics.median(t["ours"] / t["plain_fsync"] for t in times[1:])
    size = sum(f.stat().st_size for f in (work / "checkpoints").rglob("*") if f.is_file())
    return {"part": "save", "bytes": size, **row}


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("trainer", "padding", "litgpt", "resume", "save")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=22, help="of a loop; the first two are not counted")
    parser.add_argument("--folder", type=Path, help="where to work; needs 6 GB")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        model = make_model(work / "model")
        jobs: dict[str, Callable[[str], Row]] = {
            "trainer": lambda p: compare_loops("full", p, model, work, options.steps),
            "padding": lambda p: compare_loops("short", p, model, work, options.steps),
            "litgpt": lambda p: compare_litgpt(p, 2 * options.rounds),
            "resume": lambda p: compare_resume(model, work, options.rounds),
            "save": lambda p: compare_save(work, options.rounds),
        }
        for part in options.parts:
            for precision in options.precision if part in ("trainer", "padding", "litgpt") else ("",):
                rows.append(jobs[part](precision))
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        found = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
