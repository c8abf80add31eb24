"""Check token caches: unchanged files, the model's tokenizer, ids within its vocabulary, something to predict."""

import shlex
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from model.common.console import echo_line, format_bytes
from model.common.errors import InputError
from uptrain.data.prepare.tokenizer import load_tokenizer
from uptrain.data.token_cache import TokenCache

MUCH_TO_READ = 2 * 10**9
"""Bytes of token caches whose check takes long enough to be announced."""


def check_tokenizer(recorded: str, cache: Path, folder: Path) -> None:
    """Raise InputError if a cache was made with another tokenizer than the model's.

    `recorded` is the fingerprint in the cache's manifest, "" if it has none.
    """
    if recorded and load_tokenizer(folder).sha256 != recorded:
        raise InputError(
            f"{cache} was made with another tokenizer than that of {folder}; prepare it with "
            f"--tokenizer {shlex.quote(str(folder))}."
        )


def check_cache_vocabulary(cache: TokenCache, vocab_size: int, name: str) -> None:
    """Raise InputError if the cache holds ids outside the model's vocabulary.

    Ids that do not occur are ignored: some tokenizers have padding tokens without an embedding.
    """
    if cache.manifest.vocab_size > vocab_size and (highest := cache.highest_id()) >= vocab_size:
        raise InputError(
            f"{name} holds the id {highest}, but the model knows only those below {vocab_size}; prepare the data with "
            "the model's own tokenizer, from texts without the tokens that were added to it."
        )


def check_has_targets(cache: TokenCache, name: str) -> None:
    """Raise InputError if there is nothing to predict in the cache, which messages call `name`."""
    if not cache.n_targets(np.arange(cache.n_windows)):
        raise InputError(f"{name} has nothing to predict: no document in it has two tokens.")


def check_caches(caches: Iterable[TokenCache], vocab_size: int) -> None:
    """Raise InputError if a cache has changed since it was made, or by `check_cache_vocabulary`. All files are read."""
    by_folder = {cache.folder.resolve(): cache for cache in caches}
    nbytes = sum(cache.nbytes for cache in by_folder.values())
    if nbytes > MUCH_TO_READ:
        echo_line(f"Checking {format_bytes(nbytes)} of token caches.")
    for cache in by_folder.values():
        cache.verify()
        check_cache_vocabulary(cache, vocab_size, str(cache.folder))
