"""Measure a model's loss on held-out texts of many kinds, which `scripts/study/text_kinds.py` writes.

    python -m scripts.study.on_text_kinds MODEL --text-kinds FOLDER      prints JSON: nats per token, by kind

Each kind is measured on the same number of windows, evenly spaced over its documents.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import load_model
from model.decoder.transformers_model import TransformersModel

PATH = click.Path(exists=True, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
BATCH = 4


@click.command(help=__doc__)
@click.argument("model", type=FOLDER)
@click.option("--text-kinds", type=PATH, required=True, help="A folder of texts, one .jsonl a kind; or one of them.")
@click.option("--windows", type=click.IntRange(min=1), default=16, show_default=True, help="Of each kind.")
@click.option("--length", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of a window.")
def main(model: Path, text_kinds: Path, windows: int, length: int) -> None:
    tokenizer, loaded = Tokenizer.from_file(str(model / "tokenizer.json")), load_model(model, torch.float32)
    files = sorted(text_kinds.glob("*.jsonl")) if text_kinds.is_dir() else [text_kinds]
    if not files:
        raise click.ClickException(f"{text_kinds} has no .jsonl file.")
    print(json.dumps({file.stem: loss_on(loaded, ids_of(tokenizer, file), windows, length) for file in files}))


def ids_of(tokenizer: Tokenizer, file: Path) -> list[int]:
    """Return the tokens of one kind's documents, concatenated."""
    with file.open() as lines:
        return [token for line in lines for token in tokenizer.encode(json.loads(line)["text"]).ids]


@torch.inference_mode()
def loss_on(model: LlamaForCausalLM | TransformersModel, ids: Sequence[int], windows: int, length: int) -> float:
    """Return the mean loss on evenly spaced windows, in nats. Raises SystemExit if there are too few tokens."""
    if len(ids) < windows * length:
        raise SystemExit(
            f"a kind of text has {len(ids)} tokens; {windows} windows of {length} need {windows * length}."
        )
    starts = [n * (len(ids) - length) // max(windows - 1, 1) for n in range(windows)]
    ids_NT = torch.tensor([ids[start : start + length] for start in starts])
    sums = [model(ids_BT, labels_BT=ids_BT) for ids_BT in ids_NT.split(BATCH)]
    return sum(float(loss) for loss, _ in sums) / sum(int(n) for _, n in sums)


if __name__ == "__main__":
    main()
