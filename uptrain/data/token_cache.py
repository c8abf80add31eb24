"""Read the token cache: concatenated documents in flat, memory-mapped files, divided into windows of `seq_len` tokens.

    CACHE/manifest.json                content and sources; its `sha256` is the fingerprint of the cache
    CACHE/tokens-00000.bin             token ids, little-endian uint16 or uint32
    CACHE/documents-00000.bin          offset of each document in the cache shard, in tokens, int64

A window is `seq_len` consecutive tokens of all cache shards together; the last one may be shorter. If a window ends
within a document, the rest counts as another document of the next window.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from model.checkpoint.hf_folder import is_uptrain_output
from model.common import checks
from model.common.console import Advance
from model.common.errors import InputError
from model.common.machine import n_cores
from model.common.typed_json import check_types, json_bytes, make, parse_object
from model.files.paths import is_plain_name
from model.files.read import MAX_CONFIG_BYTES, read_bytes_up_to
from model.files.write import allow_open_files, file_sha256
from uptrain.data.mapped_files import map_array

MANIFEST, FORMAT, DTYPES = "manifest.json", 1, ("uint16", "uint32")
SOURCE = {
    "path": str, "files": int, "bytes": int, "sha256": str, "weight": float | None, "documents": int, "tokens": int,
    "dropped": dict[str, int], "skipped": int,
}  # fmt: skip
"""Keys of each source in a manifest, and their types."""
FILE_HASHES, HASH_DIGITS = "file_hashes", 16
"""Further key of a source: the first digits of the SHA-256 of each file. Earlier versions did not write it."""
ADVICE = "prepare the cache again"
_HASHING_THREADS = 8
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]


def id_dtype(vocab_size: int) -> str:
    """Return the narrowest of DTYPES that holds every token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class CacheShard:
    """Cache shard: a file of tokens and a file of document offsets."""

    tokens: str
    documents: str
    n_tokens: int
    n_documents: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class CacheManifest:
    """Content of a cache. The fields are the keys of manifest.json."""

    seq_len: int
    dtype: str
    """`uint16` or `uint32`."""
    vocab_size: int
    """Upper bound of the token ids, exclusive."""
    tokenizer_sha256: str
    """Fingerprint: see `uptrain.data.prepare.tokenizer.Tokenizer`; empty for data that were tokenised before."""
    shards: tuple[CacheShard, ...]
    sources: tuple[dict[str, Any], ...] = ()
    """Informative: the keys of SOURCE and FILE_HASHES for each source."""
    format: int = FORMAT

    @property
    def n_tokens(self) -> int:
        return sum(shard.n_tokens for shard in self.shards)

    @property
    def n_documents(self) -> int:
        return sum(shard.n_documents for shard in self.shards)

    @property
    def sha256(self) -> str:
        """Fingerprint of everything that training reads: tokens, document boundaries and windows."""
        hashed = (self.seq_len, self.dtype, [(s.tokens_sha256, s.documents_sha256) for s in self.shards])
        return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()

    def to_json(self) -> bytes:
        """Return the bytes of the file of the manifest."""
        content = {**asdict(self), "n_tokens": self.n_tokens, "n_documents": self.n_documents, "sha256": self.sha256}
        return json_bytes(content)

    @classmethod
    def parse(cls, folder: Path) -> Self:
        """Read the manifest of a token cache. Raises InputError if the folder is none, or the manifest is damaged."""
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(f"{folder} is not a token cache: it has no {MANIFEST}; make one with `uptrain prepare`.")
        is_of_logits = False
        try:
            content = parse_object(read_bytes_up_to(path, MAX_CONFIG_BYTES))
            is_of_logits = "top_k" in content
            if content.get("format", FORMAT) != FORMAT:
                shown = checks.short_repr(content["format"])
                raise InputError(f"it has format {shown}, and this version reads {FORMAT}")
            derived = {name: content.pop(name, None) for name in ("n_tokens", "n_documents", "sha256")}
            manifest = make(cls, content)
            manifest._check()
            for name, value in derived.items():
                if value != getattr(manifest, name):
                    raise InputError(f"its {name} does not belong to its shards")
        except InputError as error:
            if is_of_logits:
                raise InputError(
                    f"{folder} holds a teacher's logits, not tokens; give a token cache or texts. (`uptrain run` takes "
                    "logits as --teacher-logits.)"
                ) from error
            reason = str(error).rstrip(".")
            raise InputError(f"{path} is damaged: {reason}; prepare the cache again.") from error
        return manifest

    def _check(self) -> None:
        """Raise InputError for invalid values and for file names that lead out of the folder."""
        checks.whole_number(self.seq_len, "seq_len", least=2, most=checks.MAX_SIZE)
        checks.whole_number(self.vocab_size, "vocab_size")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype = {checks.short_repr(self.dtype)}; it must be one of {', '.join(DTYPES)}")
        for i, shard in enumerate(self.shards):
            checks.whole_number(shard.n_tokens, f"shards[{i}].n_tokens", least=0)
            checks.whole_number(shard.n_documents, f"shards[{i}].n_documents", least=0)
            for name in (shard.tokens, shard.documents):
                if not is_plain_name(name):
                    raise InputError(f"shards[{i}] names {checks.short_repr(name)}, which is no file of the folder")
        for i, source in enumerate(self.sources):
            check_types(source, SOURCE, f"sources[{i}]")
            if FILE_HASHES in source:
                check_types(source, {FILE_HASHES: tuple[str, ...]}, f"sources[{i}]")
        if not self.n_tokens:
            raise InputError("it has no tokens")


@dataclass
class TokenCache:
    """A token cache whose manifest and sizes have been checked, opened for reading."""

    folder: Path
    manifest: CacheManifest
    _tokens: list[Tokens] = field(repr=False)
    _starts: Integers = field(repr=False)
    """Offset of each document in the cache, in tokens, ascending."""
    _borders: Integers = field(repr=False)
    """Offset of each cache shard, in tokens, followed by the total number of tokens."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map a cache into memory. Raises InputError if a file is missing or its size differs from the manifest."""
        manifest = CacheManifest.parse(folder)
        tokens, starts, borders = [], [], [0]
        allow_open_files(len(manifest.shards))  # those of documents are read at once
        for shard in manifest.shards:
            tokens.append(map_array(folder / shard.tokens, manifest.dtype, (shard.n_tokens,), ADVICE))
            own = map_array(folder / shard.documents, "int64", (shard.n_documents,), ADVICE)
            _check_starts(own, shard.n_tokens, folder / shard.documents)
            starts.append(own + borders[-1])
            borders.append(borders[-1] + shard.n_tokens)
        return cls(folder, manifest, tokens, np.concatenate(starts), np.array(borders))

    @property
    def seq_len(self) -> int:
        return self.manifest.seq_len

    @property
    def n_windows(self) -> int:
        return -(-self.manifest.n_tokens // self.seq_len)

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        starts_bytes = self._starts.itemsize * self.manifest.n_documents
        return self.manifest.n_tokens * np.dtype(self.manifest.dtype).itemsize + starts_bytes

    def verify(self, advance: Advance = lambda n: None) -> None:
        """Compare every file with its SHA-256 in the manifest; `advance` counts bytes.

        A core hashes 0.4 to 1.5 GB/s, and up to _HASHING_THREADS hash at once; the disk is usually slower. Training
        reads the files again, then from memory if they fit. Raises InputError for the first file that differs.
        """
        shards = self.manifest.shards
        paths = [self.folder / name for shard in shards for name in (shard.tokens, shard.documents)]
        sums = [digest for shard in shards for digest in (shard.tokens_sha256, shard.documents_sha256)]
        with ThreadPoolExecutor(min(_HASHING_THREADS, n_cores())) as pool:
            for path, expected, found in zip(paths, sums, pool.map(file_sha256, paths), strict=True):
                if found != expected:
                    pool.shutdown(cancel_futures=True)
                    raise InputError(f"{path} has changed since the cache was made (SHA-256); prepare the cache again.")
                advance(path.stat().st_size)

    def window(self, index: int) -> tuple[Integers, Integers]:
        """Return a window's token ids and, for each, the index of its document within the window.

        Raises InputError for ids that exceed the vocabulary.
        """
        begin = index * self.seq_len
        end = min(begin + self.seq_len, self.manifest.n_tokens)
        first, last = np.searchsorted(self._borders, (begin, end - 1), side="right") - 1
        parts = [
            self._tokens[i][max(begin - self._borders[i], 0) : end - self._borders[i]] for i in range(first, last + 1)
        ]
        starts = self._starts_within(np.array([begin]), np.array([end]))
        inside = self._starts[starts[0][0] : starts[1][0]] - begin
        documents = np.zeros(end - begin, np.int64)
        documents[inside] = 1
        ids = np.concatenate(parts).astype(np.int64)
        if ids.max() >= self.manifest.vocab_size:
            raise InputError(
                f"{self.folder}: window {index} holds the id {ids.max()}, where the manifest says that all are below "
                f"{self.manifest.vocab_size}; the cache was changed after it was made. Prepare it again."
            )
        return ids, documents.cumsum()

    def highest_id(self) -> int:
        """Return the highest token id that occurs, from reading all tokens."""
        return max(int(tokens.max(initial=0)) for tokens in self._tokens)

    def n_targets(self, indices: Integers) -> int:
        """Return the number of targets in these windows: all tokens except the first of each document."""
        begins = indices * self.seq_len
        ends = np.minimum(begins + self.seq_len, self.manifest.n_tokens)
        first, last = self._starts_within(begins, ends)
        return int((ends - begins - 1 - (last - first)).sum())

    def _starts_within(self, begins: Integers, ends: Integers) -> tuple[Integers, Integers]:
        """Return, for each window, the range of documents that begin after its first token and before its end."""
        return np.searchsorted(self._starts, begins, side="right"), np.searchsorted(self._starts, ends, side="left")


def is_prepared(folder: Path) -> bool:
    """Return whether `uptrain prepare` or `uptrain teach` wrote a folder: a token cache, or a teacher's logits."""
    return (folder / MANIFEST).is_file() and is_uptrain_output(folder)


def _check_starts(starts: Integers, n_tokens: int, path: Path) -> None:
    """Raise InputError unless a shard's documents begin at its first token, in order, and before its end."""
    begins_at_0 = not n_tokens or (len(starts) > 0 and starts[0] == 0)
    if not begins_at_0 or (starts[1:] <= starts[:-1]).any() or (starts[-1:] >= n_tokens).any():
        raise InputError(f"{path} does not hold the beginnings of documents in order; prepare the cache again.")
