"""Measure tokens/s and memory of `uptrain run` against the loops that people would use: each in its own process.

    python -m scripts.bench.train_loop --json docs/bench/train_loop.json

full      windows of one document, against the Hugging Face Trainer: same weights, windows, micro-batch, accumulation
          and precision, with all work of a step on both sides (clipping, schedule, logging)
short     documents of half a window on average, against the Trainer: ours packs them, the Trainer pads to the longest
          of a batch
distill   full windows with a teacher, against a plain loop: two models of transformers and torch's KL divergence of
          all logits; in bf16 from checkpoints in bfloat16
attention the same; both loops train attention and the norms before it only, the default of `uptrain run` after a merge

The steps of the two loops alternate, and their tokens ÷ time are compared. (They need two processes, because both
change accelerate's state, which is global to a process.) Memory is the peak of a process's anonymous memory; on a GPU,
of the memory that torch has allocated there.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from scripts.bench.machine import Row, read_bytes, write_rows
from scripts.bench.training_inputs import (
    ACCUMULATION,
    BUDGET,
    MICRO_BATCH,
    SEQ_LEN,
    SIZES,
    make_cache,
    make_documents,
    make_model,
    merge_heads,
    settings,
)
from uptrain.runs.start_and_resume import start


class Turns:
    """Alternates the steps of two processes, so that a slow moment of the machine affects both."""

    def __init__(self, context: SpawnContext) -> None:
        self.steps: Queue[tuple[str, float, int]] = context.Queue()
        """The loop's name, and the seconds and tokens of the step."""
        self.memory = {who: context.Value("d", 0.0) for who in ("ours", "theirs")}
        """Peak of each process, in MB."""
        self._may_go = {"ours": context.Semaphore(1), "theirs": context.Semaphore(0)}
        self._started, self._tokens = 0.0, 0

    def begin(self, who: str) -> None:
        self._may_go[who].acquire()
        self._started = time.perf_counter()

    def step_ended(self, who: str, tokens: int) -> None:
        """Record a step, after which the total is `tokens`, and wait for the other loop's step."""
        self.steps.put((who, time.perf_counter() - self._started, tokens - self._tokens))
        self._tokens = tokens
        self._may_go[other(who)].release()
        self.begin(who)

    def end(self, who: str) -> None:
        """Allow the other loop to continue alone."""
        for _ in range(MANY):
            self._may_go[other(who)].release()


WITH_TEACHER = ("distill", "attention")
KINDS = ("full", "short", *WITH_TEACHER)
MANY = 1_000_000
"""A number above the steps of any loop."""


def other(who: str) -> str:
    return "theirs" if who == "ours" else "ours"


def our_loop(
    model: Path, data: Path, steps: int, precision: str, work: Path, kind: str, teacher: Path, turns: Turns
) -> None:  # fmt: skip
    with_teacher = {"loss": "distill", "teacher": str(teacher)} if kind in WITH_TEACHER else {}
    trainable = "attention" if kind == "attention" else "all"

    def show(record: Row) -> None:
        if "loss" in record:
            turns.step_ended("ours", record["tokens"])
        elif record.get("event") == "started":
            turns.begin("ours")

    given = settings(model, data, steps, precision, trainable=trainable, **with_teacher)
    start(given, BUDGET, model, work / "ours", math.inf, show)


class Documents(Dataset[dict[str, list[int]]]):
    """Documents in the form that the Trainer expects."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.documents[index]}


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest document, as DataCollatorForLanguageModeling does."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        ids = row["input_ids"]
        rest = longest - len(ids)
        filled["input_ids"].append(ids + [0] * rest)
        filled["attention_mask"].append([1] * len(ids) + [0] * rest)
        filled["labels"].append(ids + [-100] * rest)
    return {name: torch.tensor(values) for name, values in filled.items()}


class Clock(TrainerCallback):
    """Reports the start and the end of steps, and the number of tokens without padding."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.n_tokens = 0

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        self._turns.begin("theirs")

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        if torch.cuda.is_available():  # ours has waited by then
            torch.cuda.synchronize()
        self._turns.step_ended("theirs", self.n_tokens)


def their_loop(
    model: Path, documents: list[list[int]], steps: int, precision: str, work: Path, kind: str, teacher: Path,
    turns: Turns,
) -> None:  # fmt: skip
    """Train with the Hugging Face Trainer, or distil with a plain loop."""
    if kind in WITH_TEACHER:
        plain_distillation(model, teacher, documents, steps, precision, kind, turns)
        return
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


def plain_distillation(
    model: Path, teacher: Path, documents: list[list[int]], steps: int, precision: str, kind: str, turns: Turns
) -> None:  # fmt: skip
    """Distil as a short script would: the KL divergence of the student's logits from the teacher's."""
    device, is_bf16 = "cuda" if torch.cuda.is_available() else "cpu", precision == "bf16"
    student = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    parent = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    for each in (student, parent):
        torch.nn.Module.to(each, device)
    if kind == "attention":
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(".self_attn." in name or ".input_layernorm." in name)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    batches = itertools.cycle(torch.tensor(documents).split(MICRO_BATCH))
    turns.begin("theirs")
    for step in range(1, steps + 1):
        for ids_BT in itertools.islice(batches, ACCUMULATION):
            ids_BT = ids_BT.to(device)
            with torch.autocast(device, torch.bfloat16, enabled=is_bf16):
                logits_BTV = student(ids_BT).logits[:, :-1]
                with torch.no_grad():
                    target_BTV = parent(ids_BT).logits[:, :-1]
            student_NV, target_NV = (each.float().log_softmax(-1).flatten(0, 1) for each in (logits_BTV, target_BTV))
            loss = F.kl_div(student_NV, target_NV, log_target=True, reduction="batchmean")
            (loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        turns.step_ended("theirs", step * MICRO_BATCH * ACCUMULATION * SEQ_LEN)


def speed(steps: list[tuple[float, int]]) -> float:
    """Return tokens/s: all tokens ÷ all time, with each step's time limited to three times the median."""
    typical = statistics.median(seconds for seconds, _ in steps)
    return sum(tokens for _, tokens in steps) / sum(min(seconds, 3 * typical) for seconds, _ in steps)


def watch_memory(who: str, turns: Turns) -> None:
    """Report each new peak of this process's memory, in MB."""
    peak = 0
    while True:
        if (memory := used_memory()) > peak:
            peak = memory
            turns.memory[who].value = peak / 1e6
        time.sleep(0.01)


def used_memory() -> int:
    """Return the bytes that torch has allocated on the GPU at most, or this process's anonymous memory now."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return read_bytes(Path("/proc/self/status"), "RssAnon:")


def take_part(who: str, loop: Callable[..., None], turns: Turns, *arguments: Any) -> None:
    """Run one of the loops in its process."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threading.Thread(target=watch_memory, args=(who, turns), daemon=True).start()
    try:
        loop(*arguments, turns)
    finally:
        turns.end(who)


def compare_loops(kind: str, precision: str, model: Path, teacher: Path, work: Path, steps: int) -> Row:
    """Train with both loops, alternating after each step."""
    documents = make_documents("short" if kind == "short" else "full", SEQ_LEN * MICRO_BATCH * ACCUMULATION * 64)
    place = work / f"{kind}-{precision}"
    place.mkdir()
    context = multiprocessing.get_context("spawn")
    turns = Turns(context)
    cache = make_cache(place / "cache", documents)
    given = (steps, precision, place, kind, teacher)
    ours, theirs = ((model, data, *given) for data in (cache, documents))
    processes = [
        context.Process(target=take_part, args=("ours", our_loop, turns, *ours)),
        context.Process(target=take_part, args=("theirs", their_loop, turns, *theirs)),
    ]
    for process in processes:
        process.start()
    timings: dict[str, list[tuple[float, int]]] = {"ours": [], "theirs": []}
    while any(process.is_alive() for process in processes) or not turns.steps.empty():
        try:
            who, seconds, tokens = turns.steps.get(timeout=1)
            timings[who].append((seconds, tokens))
        except Empty:
            continue
    if any(process.exitcode for process in processes) or any(len(taken) != steps for taken in timings.values()):
        sys.exit("one of the loops ended with the error above.")
    speeds = {who: speed(taken[2:]) for who, taken in timings.items()}
    measured = "gpu" if torch.cuda.is_available() else "anon"
    return {
        "documents": kind, "precision": precision, "steps": steps,
        "ours_tokens_per_s": speeds["ours"], "theirs_tokens_per_s": speeds["theirs"],
        "ratio": speeds["ours"] / speeds["theirs"],
        f"ours_{measured}_mb": turns.memory["ours"].value, f"theirs_{measured}_mb": turns.memory["theirs"].value,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["bf16", "fp32"])
    parser.add_argument("--size", choices=SIZES, default="25M", help="parameters of the model")
    parser.add_argument("--steps", type=int, default=22, help="of a loop; the first two are not counted")
    parser.add_argument("--folder", type=Path, help="where to work; needs 1 GB")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    rows, shape = [], SIZES[options.size]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        for precision in options.precision:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            teacher = make_model(work / f"teacher-{precision}", shape["num_attention_heads"], dtype, shape)
            merged = merge_heads(teacher, work / f"merged-{precision}")
            for kind in options.documents:
                model = merged if kind in WITH_TEACHER else make_model(work / "model", shape=shape)
                row = compare_loops(kind, precision, model, teacher, work, options.steps)
                rows.append({"size": options.size, **row})
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
