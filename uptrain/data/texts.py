"""Texts given to `uptrain run` itself: tokenised once into a cache beside the run, then trained on like any other."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from model.checkpoint.folder import read_config
from model.errors import InputError
from uptrain.data.cache import MANIFEST
from uptrain.data.prepare import Request, prepare
from uptrain.parallel import main_first
from uptrain.signals import interruptible

LONGEST_DEFAULT = 4096
"""Models of 100 000 tokens of context were pre-trained on shorter windows for most of their steps."""


def cache_of(data: Sequence[str], tokenizer: Path, seq_len: int | None, beside: Path) -> Path:
    """Return the token cache that `data` names, or the one that is made of it at `beside`.

    `data` are sources as `uptrain prepare` takes them, `tokenizer` is the model's folder, `seq_len` None takes the
    model's context, 4096 at most. Of many processes the main one builds, and the others wait for it.
    """
    if len(data) == 1 and (Path(data[0]) / MANIFEST).is_file():
        return Path(data[0])
    main_first(lambda: _build(data, tokenizer, seq_len or _context(tokenizer), beside), beside / MANIFEST)
    return beside


def _build(data: Sequence[str], tokenizer: Path, seq_len: int, out: Path) -> None:
    workers = len(os.sched_getaffinity(0))
    with interruptible():
        found = prepare(Request(tuple(data), out, seq_len, tokenizer, workers=workers), quiet=False)
    click.echo(f"Tokenised into {out}: {found['documents']:,} documents, {found['tokens']:,} tokens", err=True)


def _context(folder: Path) -> int:
    _, config = read_config(folder)
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 2:
        raise InputError(f"{folder}/config.json does not say the model's context; give --seq-len.")
    return min(context, LONGEST_DEFAULT)
