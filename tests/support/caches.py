"""Token caches written directly, document by document, without tokenizer or command line."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from uptrain.data.token_cache import MANIFEST, CacheManifest, CacheShard


def write_cache(
    folder: Path, shards: Sequence[Sequence[Sequence[int]]], seq_len: int, vocab_size: int = 300, tokenizer: str = ""
) -> Path:
    """Write a cache of these shards, each of these documents, each of these token ids."""
    folder.mkdir()
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    made = []
    for number, documents in enumerate(shards):
        lengths = [len(ids) for ids in documents]
        starts = np.cumsum([0, *lengths[:-1]] if lengths else [])
        contents = {
            f"tokens-{number:05}.bin": np.array([i for ids in documents for i in ids], dtype).tobytes(),
            f"documents-{number:05}.bin": starts.astype("<i8").tobytes(),
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        hashes = [hashlib.sha256(content).hexdigest() for content in contents.values()]
        made.append(CacheShard(*contents, sum(lengths), len(documents), *hashes))
    manifest = CacheManifest(seq_len, dtype, vocab_size, tokenizer, tuple(made))
    (folder / MANIFEST).write_bytes(manifest.to_json())
    return folder
