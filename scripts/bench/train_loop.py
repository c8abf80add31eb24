"""Tokens/s of `uptrain run` ÷ of the Hugging Face Trainer: whole loops, in turns, in this process.

    python scripts/bench/train_loop.py --json docs/bench/train_loop.json

full     windows of one document: same weights, windows, micro-batch, accumulation and precision, with everything a
         step does on either side (clipping, schedule, logging)
short    documents of half a window on average: ours packs them, the Trainer pads to a batch's longest

The loops take their steps in turns, and their tokens ÷ time are compared.
"""

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from runs import (
    ACCUMULATION,
    BUDGET,
    MICRO_BATCH,
    SEQ_LEN,
    Row,
    make_cache,
    make_documents,
    make_model,
    reset,
    settings,
    write_rows,
)
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from uptrain.run import start


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
        "documents": kind, "precision": precision, "steps": steps,
        "ours_tokens_per_s": ours, "theirs_tokens_per_s": theirs, "ratio": ours / theirs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", nargs="+", choices=("full", "short"), default=["full", "short"])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["bf16", "fp32"])
    parser.add_argument("--steps", type=int, default=22, help="of a loop; the first two are not counted")
    parser.add_argument("--folder", type=Path, help="where to work; needs 1 GB")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        model = make_model(Path(name) / "model")
        for kind in options.documents:
            for precision in options.precision:
                rows.append(compare_loops(kind, precision, model, Path(name), options.steps))
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
