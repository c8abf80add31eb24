"""Read a teacher's logits of a token cache: for each token, the top k log-probabilities and the mass of the rest.

    LOGITS/manifest.json          content; its `sha256` is the fingerprint of the logits
    LOGITS/values-00000.bin       [windows, seq_len − 1, k + 1], little-endian float32: the k highest log-probabilities
                                  in descending order, then the log of the mass of all other tokens
    LOGITS/ids-00000.bin          [windows, seq_len − 1, k], little-endian uint16 or uint32: their token ids
    LOGITS/crc-00000.bin          [windows, 2], little-endian uint32: the CRC-32 of each window's values and ids

Row t of a window predicts its token t + 1. The rows of a short last window are followed by zeros. Needs no torch.
"""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from model.common import checks
from model.common.errors import InputError
from model.common.typed_json import json_bytes, make, parse_object
from model.files.paths import is_plain_name
from model.files.read import MAX_CONFIG_BYTES, read_bytes_up_to
from model.files.write import allow_open_files
from uptrain.data.mapped_files import map_array
from uptrain.data.token_cache import DTYPES, Integers, TokenCache

ADVICE = "run `uptrain teach` again"
MANIFEST, FORMAT, VALUES, CRC = "manifest.json", 2, "<f4", "<u4"
SHARD_BYTES = 64 << 20
"""Size of a shard, which survives a kill."""
MAX_SHARDS = 4096
"""Large caches get larger shards, so that all can be mapped into memory."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LogitsShard:
    """The logits of consecutive windows."""

    values: str
    ids: str
    crc: str
    n_windows: int
    values_sha256: str
    ids_sha256: str
    crc_sha256: str
    precision: str
    """Of the teacher's computation: `bf16` on a GPU that has it, else `fp32`."""

    @property
    def files(self) -> tuple[str, str, str]:
        return self.values, self.ids, self.crc


@dataclass(frozen=True)
class LogitsManifest:
    """Content of a folder of logits. The fields are the keys of manifest.json."""

    top_k: int
    seq_len: int
    n_windows: int
    vocab_size: int
    """Of the teacher."""
    dtype: str
    """Of the ids: `uint16` or `uint32`."""
    cache_sha256: str
    """Fingerprint of the token cache, which covers tokens, documents and windows."""
    teacher: str
    """Name of the teacher's folder."""
    teacher_sha256: str
    """Fingerprint of the teacher: see `uptrain.runs.fingerprints`."""
    shards: tuple[LogitsShard, ...]
    format: int = FORMAT

    @property
    def sha256(self) -> str:
        """Fingerprint of everything that training reads."""
        hashed = [self.top_k, self.cache_sha256, [(shard.values_sha256, shard.ids_sha256) for shard in self.shards]]
        return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()

    def to_json(self) -> bytes:
        """Return the bytes of the file of the manifest."""
        return json_bytes({**asdict(self), "sha256": self.sha256})

    @classmethod
    def parse(cls, folder: Path) -> Self:
        """Read the manifest of a folder of logits. Raises InputError if the folder is none, or it is damaged."""
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(
                f"{folder} holds no teacher's logits: it has no {MANIFEST}; make them with `uptrain teach`."
            )
        is_of_tokens = False
        try:
            content = parse_object(read_bytes_up_to(path, MAX_CONFIG_BYTES))
            is_of_tokens = "n_documents" in content
            recorded = content.pop("sha256", None)
            manifest = make(cls, content)
            manifest._check()
            if recorded != manifest.sha256:
                raise InputError("its sha256 does not belong to its shards")
        except InputError as error:
            if is_of_tokens:
                raise InputError(f"{folder} is a token cache; give what `uptrain teach` made of it.") from error
            reason = str(error).rstrip(".")
            raise InputError(
                f"{path} is damaged, or no manifest of logits: {reason}; run `uptrain teach` again."
            ) from error
        return manifest

    def _check(self) -> None:
        """Raise InputError for invalid values and for file names that lead out of the folder."""
        if self.format != FORMAT:
            raise InputError(f"it has format {checks.short_repr(self.format)}, and this version reads {FORMAT}")
        for name in ("top_k", "seq_len", "n_windows", "vocab_size"):
            checks.whole_number(getattr(self, name), name)
        if self.dtype not in DTYPES:
            raise InputError(f"dtype = {checks.short_repr(self.dtype)}; it must be one of {', '.join(DTYPES)}")
        for i, shard in enumerate(self.shards):
            checks.whole_number(shard.n_windows, f"shards[{i}].n_windows")
            for name in shard.files:
                if not is_plain_name(name):
                    raise InputError(f"shards[{i}] names {checks.short_repr(name)}, which is no file of the folder")
        if sum(shard.n_windows for shard in self.shards) != self.n_windows:
            raise InputError("its shards do not hold n_windows")

    def check_cache(self, cache: TokenCache, folder: Path) -> None:
        """Raise InputError if the logits in `folder` are of another token cache."""
        if self.cache_sha256 != cache.manifest.sha256:
            raise InputError(
                f"{folder} is of another token cache than {cache.folder} (sha256 {self.cache_sha256[:12]}, not "
                f"{cache.manifest.sha256[:12]}): of other texts, another tokenizer or another window length. Run "
                f"`uptrain teach` on {cache.folder}."
            )
        if (self.seq_len, self.n_windows) != (cache.seq_len, cache.n_windows):
            raise InputError(
                f"{folder / MANIFEST} is damaged: it has {self.n_windows} windows of {self.seq_len} tokens, and "
                f"{cache.folder} has {cache.n_windows} of {cache.seq_len}; run `uptrain teach` again."
            )


def windows_per_shard(seq_len: int, n_windows: int, top_k: int, dtype: str) -> int:
    """Return the number of windows in a shard, a function of the content alone."""
    return max(1, SHARD_BYTES // window_bytes(seq_len, top_k, dtype), -(-n_windows // MAX_SHARDS))


def window_crcs(values: Floats, ids: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each window's values and ids, [B, 2]. They check a window without the rest of its shard."""
    pairs = zip(values, ids, strict=True)
    return np.array([[zlib.crc32(np.ascontiguousarray(part).data) for part in pair] for pair in pairs], CRC)


def window_bytes(seq_len: int, top_k: int, dtype: str) -> int:
    return (seq_len - 1) * ((top_k + 1) * np.dtype(VALUES).itemsize + top_k * np.dtype(dtype).itemsize)


@dataclass
class TeacherLogits:
    """Logits of a teacher whose manifest and sizes have been checked, opened for reading."""

    folder: Path
    manifest: LogitsManifest
    _values: list[npt.NDArray[Any]] = field(repr=False)
    _ids: list[npt.NDArray[Any]] = field(repr=False)
    _crcs: list[npt.NDArray[np.uint32]] = field(repr=False)
    _ends: Integers = field(repr=False)
    """The window after each shard's last."""
    _verified: set[int] = field(default_factory=set, repr=False)
    """The shards whose CRCs have been compared with their checksum."""

    @classmethod
    def open(cls, folder: Path, cache: TokenCache) -> Self:
        """Map logits into memory. Raises InputError if they are of another cache, or a file's size is wrong."""
        manifest = LogitsManifest.parse(folder)
        manifest.check_cache(cache, folder)
        rows, k = manifest.seq_len - 1, manifest.top_k
        shards = manifest.shards
        allow_open_files(3 * len(shards))
        values = [map_array(folder / s.values, VALUES, (s.n_windows, rows, k + 1), ADVICE) for s in shards]
        ids = [map_array(folder / s.ids, manifest.dtype, (s.n_windows, rows, k), ADVICE) for s in shards]
        crcs = [map_array(folder / s.crc, CRC, (s.n_windows, 2), ADVICE) for s in shards]
        return cls(folder, manifest, values, ids, crcs, np.cumsum([shard.n_windows for shard in shards]))

    def read(self, windows: Integers) -> tuple[Floats, Integers]:
        """Return values [B, T − 1, k + 1] and token ids [B, T − 1, k] of windows.

        Raises InputError if a window differs from its checksum, and for ids that exceed the vocabulary.
        """
        values, ids = [], []
        for window in windows.tolist():
            shard = int(np.searchsorted(self._ends, window, side="right"))
            row = window - (int(self._ends[shard - 1]) if shard else 0)
            values.append(self._values[shard][row])
            ids.append(self._ids[shard][row])
            self._verify(shard, row)
        all_ids = np.stack(ids).astype(np.int64)
        if all_ids.max() >= self.manifest.vocab_size:
            raise InputError(
                f"{self.folder} holds the id {all_ids.max()}, where its manifest says that all are below "
                f"{self.manifest.vocab_size}; run `uptrain teach` again."
            )
        return np.stack(values), all_ids

    def _verify(self, number: int, row: int) -> None:
        shard, crcs = self.manifest.shards[number], self._crcs[number]
        if number not in self._verified and hashlib.sha256(crcs.data).hexdigest() != shard.crc_sha256:
            raise self._damaged(shard.crc, MANIFEST)
        self._verified.add(number)
        window = slice(row, row + 1)
        different = window_crcs(self._values[number][window], self._ids[number][window])[0] != crcs[row]
        if different.any():
            raise self._damaged(shard.values if different[0] else shard.ids, shard.crc)

    def _damaged(self, name: str, sums: str) -> InputError:
        return InputError(
            f"{self.folder / name} is damaged: its checksum is not the one in {sums}; remove {self.folder}, and run "
            "`uptrain teach` again."
        )
