"""Find the token caches of a run, and tokenise texts given to `uptrain run` into a cache beside the run."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model.common.console import echo, format_bytes, warn
from model.common.counts import counted
from model.common.machine import n_cores
from model.texts.hub import HUB
from uptrain.data.default_sizes import choose_seq_len
from uptrain.data.prepare.prepare import PrepareOptions, prepare
from uptrain.data.prepare.sources import find_sources
from uptrain.data.token_cache import FILE_HASHES, HASH_DIGITS, MANIFEST, CacheManifest, is_prepared
from uptrain.distributed.collectives import on_main_without_group
from uptrain.distributed.signals import CONTINUES, STARTS_AGAIN, interruptible

BYTES_PER_TOKEN = 4
"""Approximate bytes of text per token."""
MUCH_TEXT = 10**9
"""Bytes of texts that take minutes to tokenise."""
OF_EMPTY_FILE = hashlib.sha256(b"").hexdigest()[:HASH_DIGITS]
SURPLUS = 4
"""Texts of so many times what a run needs are worth a warning."""


def ensure_cache(
    data: Sequence[str], model: Path, seq_len: int, out: Path, option: str = "--data",
    temporary: bool = False, quiet: bool = False,
) -> Path:  # fmt: skip
    """Return the token cache that `data` names; if `data` names texts, tokenise them into `out` first.

    `data` are sources of `uptrain prepare`, which `option` gave. `model` is a folder with a tokenizer. `temporary`: the
    caller deletes the cache. The main process builds the cache, and the others wait for it.
    """
    if not is_prepared_data(data):
        options = PrepareOptions(
            tuple(data), out, seq_len, model, workers=n_cores(), option=option, temporary=temporary
        )
        on_main_without_group(lambda: _build(options, quiet), out / MANIFEST)
    return cache_folder(data, out)


def cache_folder(data: Sequence[str], out: Path) -> Path:
    """Return the folder of the token cache of `data`: the cache that it names, or `out` for texts."""
    return Path(data[0]) if is_prepared_data(data) else out


def run_cache_folder(run: Path, what: str) -> Path:
    """Return the folder of the token cache of a run's texts; `what` is `data` or `eval_data`."""
    return run.with_name(f"{run.name}.{what.replace('_', '-')}")


def surplus_warning(data: Sequence[str], n_tokens: int, out: Path) -> str | None:
    """Return a warning if `data` names far more texts than the tokens of a run; None if not, or if `out` has them.

    Datasets of the hub are not counted: that would download them.
    """
    if is_prepared_data(data) or (out / MANIFEST).is_file():
        return None
    nbytes, needed = sum(Path(file).stat().st_size for file in _files_here(data, "--data")), BYTES_PER_TOKEN * n_tokens
    if nbytes < MUCH_TEXT or nbytes < SURPLUS * needed:
        return None
    return (
        f"all of --data, {format_bytes(nbytes)}, is tokenised first, though the run reads only about "
        f"{format_bytes(needed)} of it. `uptrain prepare --tokens {n_tokens}` tokenises only the beginning."
    )


def overlap_warning(data: Sequence[str], eval_data: Sequence[str]) -> str | None:
    """Return a warning if a file is in both the training and the held-out texts.

    Caches and datasets of the hub are left to `shared_source_warning`, once they are made.
    """
    named = ((data, "--data"), (eval_data, "--eval-data"))
    training, held_out = ({os.path.realpath(file): file for file in _files_here(*texts)} for texts in named)
    shared = [held_out[path] for path in held_out if path in training]
    if not shared:
        return None
    more = f", and {len(shared) - 1:,} more held-out files are" if len(shared) > 1 else " is"
    return f"{shared[0]}{more} in both --data and --eval-data, so held-out losses will not be those of new text."


def shared_source_warning(training: CacheManifest, held_out: CacheManifest) -> str | None:
    """Return a warning if two caches were made of the same files, by the manifests' hashes."""
    trained = {file for source in training.sources if source["tokens"] for file in _file_hashes(source)}
    for source in held_out.sources:
        files = _file_hashes(source)
        shared = sum(file in trained for file in files)
        if shared and source["tokens"]:
            text = "text" if shared == len(files) else f"text, in {shared:,} of its {len(files):,} files,"
            return (
                f"the held-out {text} {source['path']} is part of the training data, so held-out losses will not be "
                "those of new text."
            )
    return None


def _file_hashes(source: Mapping[str, Any]) -> list[str]:
    """Return the hashes of a source's files that hold anything.

    A cache of an earlier version has one hash for several files.
    """
    hashes: list[str] = source.get(FILE_HASHES, [source["sha256"][:HASH_DIGITS]])
    return [each for each in hashes if each != OF_EMPTY_FILE]


def _files_here(data: Sequence[str], option: str) -> list[str]:
    """Return the files of texts, without those of datasets of the hub, which would be downloaded, and of a cache."""
    here = () if is_prepared_data(data) else tuple(source for source in data if not source.startswith(HUB))
    return [file for source in find_sources(here, option) for file in source.text.files]


def is_prepared_data(data: Sequence[str]) -> bool:
    """Return whether the sources are a single folder that `uptrain prepare` or `uptrain teach` wrote.

    Where a token cache is due, `CacheManifest.parse` refuses logits.
    """
    return len(data) == 1 and data[0] != "" and is_prepared(Path(data[0]))


def seq_len_of(data: Sequence[str], model: Path, requested: int | None) -> int:
    """Return the length of the windows of a cache, or of one that is made of texts (`choose_seq_len`)."""
    return choose_seq_len(requested, Path(data[0]) if is_prepared_data(data) else None, model)


def _build(options: PrepareOptions, quiet: bool) -> None:
    with interruptible(STARTS_AGAIN if options.temporary else CONTINUES):
        summary = prepare(options, quiet)
    if ignored := summary["ignored"]:
        n = f"{len(ignored):,} files or folders that hold no texts"
        warn(f"{options.option}: {n} are left out, such as {ignored[0]}.")
    if not quiet:
        where = "" if options.temporary else f" into {options.out}"
        echo(f"Tokenised{where}: {counted(summary['documents'], 'document')}, {summary['tokens']:,} tokens", err=True)
