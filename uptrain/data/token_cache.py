"""The token cache: all documents end to end in flat files, mapped into memory, cut into windows of `seq_len` tokens.

    CACHE/manifest.json                what it holds and from what it was made; its `sha256` is the cache's identity
    CACHE/tokens-00000.bin             token ids, little-endian uint16 or uint32
    CACHE/documents-00000.bin          where each document of the shard begins, in tokens from its start, int64

A window is `seq_len` consecutive tokens of the whole; the last one may be shorter. A document that a window cuts goes
on in the next one as if it were another.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from model.common import checks
from model.common.errors import InputError
from model.common.files import is_plain_name
from model.common.read_files import CONFIG_BYTES, read_bytes_up_to
from model.common.typed_json import check_types, make, parse_object

MANIFEST, FORMAT, DTYPES = "manifest.json", 1, ("uint16", "uint32")
SOURCE = {
    "path": str, "files": int, "bytes": int, "sha256": str, "weight": float | None, "documents": int, "tokens": int,
    "dropped": dict[str, int], "skipped": int,
}  # fmt: skip
"""What a manifest says of each source."""
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CacheShard:
    """A pair of files."""

    tokens: str
    documents: str
    n_tokens: int
    n_documents: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a cache holds. Fields are written as they are named here."""

    seq_len: int
    dtype: str
    """`uint16` or `uint32`."""
    vocab_size: int
    """Number of ids the tokenizer may give: all tokens are below it."""
    tokenizer_sha256: str
    """Identity of the tokenizer: see `uptrain.data.prepare.tokenizer`; empty for data that came tokenised."""
    shards: tuple[CacheShard, ...]
    sources: tuple[dict[str, Any], ...] = ()
    """For people and cards: path, sha256, weight, documents, tokens, and how many records were dropped and why."""
    format: int = FORMAT

    @property
    def n_tokens(self) -> int:
        return sum(shard.n_tokens for shard in self.shards)

    @property
    def n_documents(self) -> int:
        return sum(shard.n_documents for shard in self.shards)

    @property
    def sha256(self) -> str:
        """The identity of everything training sees: the tokens, the documents' borders, and the windows."""
        seen = (self.seq_len, self.dtype, [(s.tokens_sha256, s.documents_sha256) for s in self.shards])
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()

    def text(self) -> bytes:
        shown = {**asdict(self), "n_tokens": self.n_tokens, "n_documents": self.n_documents, "sha256": self.sha256}
        return (json.dumps(shown, indent=2, ensure_ascii=False) + "\n").encode()

    @classmethod
    def parse(cls, folder: Path) -> Self:
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(f"{folder} is not a token cache: it has no {MANIFEST}; make one with `uptrain prepare`.")
        try:
            found = parse_object(read_bytes_up_to(path, CONFIG_BYTES))
            if found.get("format", FORMAT) != FORMAT:
                said = checks.show(found["format"])
                raise InputError(f"it has format {said}, and this version reads {FORMAT}")
            derived = {name: found.pop(name, None) for name in ("n_tokens", "n_documents", "sha256")}
            manifest = make(cls, found)
            manifest.check()
            for name, value in derived.items():
                if value != getattr(manifest, name):
                    raise InputError(f"its {name} does not belong to its shards")
        except InputError as error:
            why = str(error).rstrip(".")
            raise InputError(f"{path} is damaged: {why}; prepare the cache anew.") from error
        return manifest

    def check(self) -> None:
        """Raise InputError for values that no cache has, and file names that lead out of its folder."""
        checks.whole_number(self.seq_len, "seq_len", least=2)
        checks.whole_number(self.vocab_size, "vocab_size")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype = {checks.show(self.dtype)}; it must be one of {', '.join(DTYPES)}")
        for i, shard in enumerate(self.shards):
            checks.whole_number(shard.n_tokens, f"shards[{i}].n_tokens", least=0)
            checks.whole_number(shard.n_documents, f"shards[{i}].n_documents", least=0)
            for name in (shard.tokens, shard.documents):
                if not is_plain_name(name):
                    raise InputError(f"shards[{i}] names {checks.show(name)}, which is no file of the folder")
        for i, source in enumerate(self.sources):
            check_types(source, SOURCE, f"sources[{i}]")
        if not self.n_tokens:
            raise InputError("it has no tokens")


@dataclass
class Cache:
    """An open cache."""

    folder: Path
    manifest: Manifest
    _tokens: list[Tokens] = field(repr=False)
    _starts: Integers = field(repr=False)
    """Where each document begins in the whole, ascending."""
    _borders: Integers = field(repr=False)
    """Where each shard begins, and at last where all end."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map a cache. Raises InputError where a file is missing or has not the size the manifest says."""
        manifest = Manifest.parse(folder)
        tokens, starts, borders = [], [], [0]
        for shard in manifest.shards:
            tokens.append(_map(folder / shard.tokens, manifest.dtype, shard.n_tokens))
            starts.append(_map(folder / shard.documents, "int64", shard.n_documents) + borders[-1])
            borders.append(borders[-1] + shard.n_tokens)
        return cls(folder, manifest, tokens, np.concatenate(starts), np.array(borders))

    @property
    def seq_len(self) -> int:
        return self.manifest.seq_len

    @property
    def n_windows(self) -> int:
        return -(-self.manifest.n_tokens // self.seq_len)

    def window(self, index: int) -> tuple[Integers, Integers]:
        """Return a window's token ids and, for each, the number of its document within the window.

        Raises InputError for ids that cannot be there.
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
                f"{self.manifest.vocab_size}; the cache was changed after it was made. Prepare it anew."
            )
        return ids, documents.cumsum()

    def highest_id(self) -> int:
        """Return the highest id that occurs. Reads all tokens."""
        return max(int(tokens.max(initial=0)) for tokens in self._tokens)

    def n_targets(self, indices: Integers) -> int:
        """Return how many next tokens there are to predict in these windows: all but the first of each document."""
        begins = indices * self.seq_len
        ends = np.minimum(begins + self.seq_len, self.manifest.n_tokens)
        first, last = self._starts_within(begins, ends)
        return int((ends - begins - 1 - (last - first)).sum())

    def _starts_within(self, begins: Integers, ends: Integers) -> tuple[Integers, Integers]:
        """Return the range of documents that begin after the first token of a window and before its end."""
        return np.searchsorted(self._starts, begins, side="right"), np.searchsorted(self._starts, ends, side="left")


def _map(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    wanted = count * np.dtype(dtype).itemsize
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        raise InputError(f"the cache lacks {path}, which its manifest names; prepare it anew.")
    if found != wanted:
        raise InputError(f"{path} has {found} bytes where the manifest says {wanted}; prepare the cache anew.")
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r") if count else np.empty(0, dtype)
