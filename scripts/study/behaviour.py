"""Measure what a mean loss does not show: the loss by position and by kind of token, and the text a model generates.

    python -m scripts.study.behaviour MODEL --parent PARENT --texts valid.jsonl      prints JSON

The loss by position shows quality that is lost far from the beginning, where the KV cache is large. Rare tokens, and
tokens that the text has shown before, are measured on their own; the latter also on random tokens that come twice, the
test for induction heads of Olsson et al. (2022, In-context Learning and Induction Heads). Likelihood flatters converted
models, so both models also continue held-out passages greedily. Measured are the number of tokens until a model differs
from its parent, and the share of its text that repeats itself.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from model.decoder.generation import generate
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import load_model

WINDOWS_PER_TEXT, BATCH, POSITIONS = 4, 4, 1024
PROMPT, WRITTEN = 32, 64
"""Tokens of a prompt, and generated tokens."""
NGRAM = 4
MAX_WINDOW = 2048
"""Maximum tokens of a window."""
OCCURRENCES = {"once": 1, "2 to 9 times": 2, "10 to 99 times": 10, "100 times or more": 100}
"""Kinds of tokens: the least number of times that they occur in the texts."""
COPIES, COPIED_TOKENS = 16, 64
"""Number of copies of random tokens, and the length of each."""

FOLDER = click.Path(exists=True, path_type=Path)


@click.command(help=__doc__)
@click.argument("model", type=FOLDER)
@click.option("--parent", type=FOLDER, required=True)
@click.option("--texts", type=FOLDER, required=True, help="JSON lines with a key text, or a folder of .txt.")
@torch.inference_mode()
def main(model: Path, parent: Path, texts: Path) -> None:
    student, teacher = (load_native(folder) for folder in (model, parent))
    ids_NT = windows(parent, texts, min(MAX_WINDOW, context(parent)))
    own_losses_NT, parents_losses_NT = (token_losses(m, ids_NT) for m in (student, teacher))
    prompts = ids_NT[:, :PROMPT].tolist()
    own, parents = (generate(m, prompts, WRITTEN, stop_ids=()) for m in (student, teacher))
    measures = {
        "positions": bounds(ids_NT.shape[1]),
        "loss_by_position": by_position(own_losses_NT),
        "parents_loss_by_position": by_position(parents_losses_NT),
        "loss_by_kind": by_kind(own_losses_NT, ids_NT) | copying(student),
        "parents_loss_by_kind": by_kind(parents_losses_NT, ids_NT) | copying(teacher),
        "prompts": len(prompts),
        "tokens_until_they_part": sum(map(in_common, own, parents)) / len(prompts),
        "repeated": sum(map(repeated, own)) / len(prompts),
        "parents_repeated": sum(map(repeated, parents)) / len(prompts),
    }
    print(json.dumps(measures))


def context(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


def load_native(folder: Path) -> LlamaForCausalLM:
    model = load_model(folder, torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model


def windows(tokenizer: Path, texts: Path, length: int) -> Tensor:
    """Return the first windows of each text, each of `length` tokens, [N, T]."""
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    rows = []
    for text in documents(texts):
        ids = encode(text).ids
        rows += [ids[i * length : (i + 1) * length] for i in range(min(WINDOWS_PER_TEXT, len(ids) // length))]
    return torch.tensor(rows)


def documents(texts: Path) -> Iterator[str]:
    if texts.is_dir():
        yield from (file.read_text() for file in sorted(texts.glob("*.txt")))
    else:
        with texts.open() as lines:  # str.splitlines would also end a line within a text
            yield from (json.loads(line)["text"] for line in lines)


def bounds(length: int) -> list[int]:
    """Return the ends of bins of positions. Each bin is as long as all bins before it together."""
    ends = [length]
    while ends[0] > 16:
        ends.insert(0, ends[0] // 2)
    return ends


def token_losses(model: LlamaForCausalLM, ids_NT: Tensor) -> Tensor:
    """Return the loss of each target, the tokens from the second on, in nats: [N, T - 1]."""
    losses = []
    for ids_BT in ids_NT.split(BATCH):
        hidden_NM, targets_N = model.hidden(ids_BT)[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
        # With a large vocabulary, the logits of all positions would not fit into memory.
        for some_NM, own_N in zip(hidden_NM.split(POSITIONS), targets_N.split(POSITIONS), strict=True):
            losses.append(F.cross_entropy(model.logits(some_NM), own_N, reduction="none"))
    return torch.cat(losses).view(len(ids_NT), -1)


def by_position(losses_NT: Tensor) -> list[float]:
    """Return the mean loss of the targets in each bin of positions."""
    mean_T = losses_NT.mean(dim=0)
    ends = bounds(len(mean_T) + 1)
    return [
        float(mean_T[start : end - 1].mean()) for start, end in zip([0, *(e - 1 for e in ends)], ends, strict=False)
    ]


def by_kind(losses_NT: Tensor, ids_NT: Tensor) -> dict[str, float]:
    """Return the mean loss of the targets by kind; kinds that no target is of are left out.

    Kinds are: how often a token occurs in the texts, and whether its window has it after the same token before.
    """
    _, inverse_NT, counts = ids_NT.unique(return_inverse=True, return_counts=True)
    occurrences_NT = counts[inverse_NT][:, 1:]
    seen_NT = torch.tensor([seen_before(list(pairwise(window))) for window in ids_NT.tolist()])
    masks = {"seen before": seen_NT, "not seen before": ~seen_NT}
    for (name, least), above in zip(OCCURRENCES.items(), [*list(OCCURRENCES.values())[1:], math.inf], strict=True):
        masks[name] = (occurrences_NT >= least) & (occurrences_NT < above)
    return {name: float(losses_NT[mask_NT].mean()) for name, mask_NT in masks.items() if mask_NT.any()}


def seen_before(pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each pair of neighbouring tokens whether it is the same as one before it."""
    first: dict[tuple[int, int], int] = {}
    return [first.setdefault(pair, i) < i for i, pair in enumerate(pairs)]


def copying(model: LlamaForCausalLM) -> dict[str, float]:
    """Return the loss of the tokens of a random sequence when it is repeated, but for its first token."""
    generator = torch.Generator().manual_seed(0)
    ids_NT = torch.randint(model.config.vocab_size, (COPIES, COPIED_TOKENS), generator=generator)
    return {"copied": float(token_losses(model, ids_NT.repeat(1, 2))[:, COPIED_TOKENS:].mean())}


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens before two texts first differ."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def repeated(ids: Sequence[int]) -> float:
    """Return the share of a text's n-grams that occur earlier in the text."""
    grams = list(zip(*(ids[i:] for i in range(NGRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams)


if __name__ == "__main__":
    main()
