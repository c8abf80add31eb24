"""Distil the default merge of a model for a few steps, on texts of one kind, and measure it on texts of every kind.

    python -m scripts.study.distil_on_text_kinds .study/merges/smollm2_kinds --work .study/distilled

FOLDER is that of an external parent that the plan `text_kinds` has made: model/ and text_kinds/. Every measurement is a
line of WORK/results.jsonl; existing ones are not repeated.
"""

import json
import shutil
from pathlib import Path

import click

from model.checkpoint import open_checkpoint
from model.files.write import replace_file
from scripts.bench.machine import commit
from scripts.study import programs
from scripts.study.arms import append, weights_hash
from scripts.study.results import read_lines

FOLDER = click.Path(file_okay=False, path_type=Path)
MIXTURE = programs.ROOT / "convert/calibration_text/sample_texts/mixture.jsonl.xz"
KINDS = ("chat", "python", "shipped", "self")
"""Texts to train on: of a kind, the shipped calibration text, or text that the parent generates."""
STEPS, STEP_TOKENS, WINDOW = 12, 2048, 512
OWN_TOKENS = 32_768
HELD_OUT_WINDOWS = 4


@click.command(help=__doc__)
@click.argument("folder", type=FOLDER)
@click.option("--work", type=FOLDER, required=True)
@click.option("--lr", default=2e-4, show_default=True)
def main(folder: Path, work: Path, lr: float) -> None:
    parent, text_kinds, merged, results = (
        folder / "model",
        folder / "text_kinds",
        work / "merged",
        work / "results.jsonl",
    )
    work.mkdir(parents=True, exist_ok=True)
    lines = read_lines(results) if results.exists() else []
    parent_sha256 = weights_hash(parent)
    if any(line.get("parent_sha256") != parent_sha256 for line in lines):
        raise click.ClickException(f"{work} has results of another parent or version; choose another --work.")
    done = {(line["distilled_on"], line["lr"]) for line in lines}
    programs.run("convert", "mha-to-mqa", parent, merged, "--overwrite", "--json")
    for kind in (None, *KINDS):
        rate = None if kind is None else lr
        if (kind, rate) in done:
            continue
        model = merged if kind is None else distil(merged, parent, text_of(kind, parent, text_kinds, work), lr, work)
        words = (model, "--text-kinds", text_kinds / "held-out", "--windows", HELD_OUT_WINDOWS)
        losses = json.loads(programs.run("scripts.study.on_text_kinds", *words))
        tokens = 0 if kind is None else STEPS * STEP_TOKENS
        line = {
            "start": "default", "distilled_on": kind, "lr": rate, "tokens": tokens, "text_kinds": losses,
            "parent_sha256": parent_sha256, "commit": commit(),
        }  # fmt: skip
        append(results, line)
        click.echo(f"{kind or 'after conversion'}: {sum(losses.values()) / len(losses):.4f} on average")


def text_of(kind: str, parent: Path, text_kinds: Path, work: Path) -> Path:
    """Return a text of one kind. The parent writes its own on the first call."""
    if kind == "shipped":
        return MIXTURE
    if kind != "self":
        return text_kinds / "own" / f"{kind}.jsonl"
    own = work / "self.jsonl"
    if not own.exists():
        from convert.calibration.generated_text import TextGeneration
        from convert.calibration_text.choices import SELF
        from convert.calibration_text.read import read_calibration_text

        with open_checkpoint(parent) as checkpoint:
            text = read_calibration_text(checkpoint, SELF, OWN_TOKENS)
            generation = TextGeneration.of(checkpoint, text, seed=1)
            ids_NT = generation.generate(work / "generated-text", lambda n: None)
        replace_file(own, "".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids_NT).encode())
    return own


def distil(merged: Path, parent: Path, text: Path, lr: float, work: Path) -> Path:
    """Train the merged model on its parent's distribution over a text, and return the exported model."""
    run = work / "run"
    for old in (run, work / "run.data"):
        shutil.rmtree(old, ignore_errors=True)
    options = ("--seq-len", WINDOW, "--steps", STEPS, "--global-batch-tokens", STEP_TOKENS, "--micro-batch", 4)
    programs.train(
        run, "run", merged, "--data", text, *options, "--lr", lr, "--teacher", parent, "--precision", "fp32",
        "--trainable", "all", "--out", run,
    )  # fmt: skip
    programs.run("uptrain", "export", run, run / "exported", "--json")
    return run / "exported"


if __name__ == "__main__":
    main()
