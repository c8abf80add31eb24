"""Tokenise a work unit into a cache shard, in a worker process."""

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from model.common.errors import InputError
from model.texts import Document, Piece, Problem, Reader, find_reader
from model.texts.record import EMPTY, TOKEN_IDS, OtherLabels
from uptrain.data.prepare.tokenizer import Encoder
from uptrain.data.prepare.work_units import Unit, UnitRecord, check_unchanged

BATCH = 1 << 20
"""Number of characters, token ids or source bytes to gather before they are encoded and written."""

NO_TOKENIZER = (
    "a text, but no --tokenizer to tokenise it with (if the record has token ids too, remove the field of the text)"
)

Progress = Callable[[int, int], None]
"""Callback with the numbers of further bytes read and tokens written. May raise, to stop the work."""


@dataclass(frozen=True)
class Job:
    """Settings that all units share."""

    folder: Path
    vocab_size: int
    dtype: str
    text_column: str
    skip_bad: bool
    """Whether to skip and count bad records; otherwise the first one is an error."""


def shard_names(number: int) -> tuple[str, str]:
    """Return the file names of a cache shard: tokens and documents."""
    return f"tokens-{number:05}.bin", f"documents-{number:05}.bin"


def tokenise(unit: Unit, job: Job, encoder: Encoder | None, report: Progress) -> UnitRecord:
    """Write the cache shard of a unit and sync it to the disk; return its record.

    Raises InputError for a damaged file, and for the first bad record, with its position, unless they are skipped.
    """
    fingerprint = unit.fingerprint()
    with _Shard(job, unit.number) as shard:
        work = _Work(job, shard, encoder, report)
        ends = [0]
        for piece in unit.pieces:
            work.read(piece, find_reader(unit.format))
            ends.append(shard.n_tokens)
        tokens_sha256, documents_sha256 = shard.finish()
    check_unchanged(unit, fingerprint)
    return UnitRecord(
        identity=fingerprint,
        n_tokens=shard.n_tokens,
        n_documents=len(shard.starts),
        n_records=work.n_records,
        dropped=dict(work.dropped),
        skipped=work.skipped,
        first_bad=work.first_bad,
        tokens_sha256=tokens_sha256,
        documents_sha256=documents_sha256,
        other_labels=work.other_labels,
        piece_tokens=[end - begin for begin, end in pairwise(ends)],
    )


class _Shard:
    """Cache shard while it is written."""

    def __init__(self, job: Job, number: int) -> None:
        self._paths = [job.folder / name for name in shard_names(number)]
        self._dtype = np.dtype(job.dtype).newbyteorder("<")
        self._hash = hashlib.sha256()
        self.n_tokens = 0
        self.starts = array("q")

    def __enter__(self) -> Self:
        self._file = _partial(self._paths[0]).open("wb")
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, documents: list[npt.NDArray[np.integer]]) -> None:
        for ids in documents:
            self.starts.append(self.n_tokens)
            self.n_tokens += len(ids)
        content = np.concatenate(documents).astype(self._dtype, copy=False).tobytes()
        self._hash.update(content)
        self._file.write(content)

    def finish(self) -> tuple[str, str]:
        """Sync the files and rename them to their final names; return their hashes."""
        starts = np.array(self.starts, "<i8").tobytes()
        with _partial(self._paths[1]).open("wb") as documents:
            documents.write(starts)
            for file in (self._file, documents):
                file.flush()
                os.fsync(file.fileno())
        for path in self._paths:
            _partial(path).rename(path)
        return self._hash.hexdigest(), hashlib.sha256(starts).hexdigest()


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


class _Work:
    """Read records, gather, encode and write their documents, and count the rest."""

    def __init__(self, job: Job, shard: _Shard, encoder: Encoder | None, report: Progress) -> None:
        self._job, self._shard, self._encoder, self._report = job, shard, encoder, report
        self._gathered: list[tuple[int, str | npt.NDArray[np.int64]]] = []
        """Documents of the current piece that are not written yet, each with its row."""
        self.n_records = self.skipped = self.other_labels = 0
        self.dropped: Counter[str] = Counter()
        self.first_bad = ""

    def read(self, piece: Piece, reader: Reader) -> None:
        size, reported, place = 0, 0, partial(reader.place, piece)
        for row, bytes_read, document in reader.read(piece, self._job.text_column):
            self.n_records += 1
            problem = self._problem(document)
            if problem is None:
                self.other_labels += isinstance(document, OtherLabels)
                self._gathered.append((row, document))  # type: ignore[arg-type]  # not a Problem
                size += len(document)
            else:
                self._note(problem, row, place)
            if max(size, bytes_read - reported) >= BATCH:
                self._flush(bytes_read - reported, place)
                size, reported = 0, bytes_read
        self._flush(piece.nbytes - reported, place)

    def _problem(self, document: Document | Problem) -> Problem | None:
        if isinstance(document, Problem):
            return document
        if isinstance(document, str):
            return None if self._encoder else Problem(NO_TOKENIZER)
        out_of_range = (document < 0) | (document >= self._job.vocab_size)
        if not out_of_range.any():
            return None
        position = int(out_of_range.argmax())
        return Problem(
            f"token id {document[position]} at position {position} of {TOKEN_IDS!r}, outside the vocabulary of "
            f"{self._job.vocab_size:,}"
        )

    def _note(self, problem: Problem, row: int, place: Callable[[int], str]) -> None:
        if not problem.bad:
            self.dropped[problem.reason] += 1
            return
        self.skipped += 1
        self.first_bad = self.first_bad or f"{place(row)}: {problem.reason}"
        if not self._job.skip_bad:
            raise InputError(stop_message(self.first_bad))

    def _flush(self, bytes_read: int, place: Callable[[int], str]) -> None:
        before = self._shard.n_tokens
        encoded = iter(self._encode([document for _, document in self._gathered if isinstance(document, str)]))
        filled = []
        for row, document in self._gathered:
            ids = next(encoded) if isinstance(document, str) else document
            if isinstance(ids, Problem):
                self._note(ids, row, place)
            elif len(ids):
                filled.append(np.array(ids, self._job.dtype) if isinstance(document, str) else document)
            else:  # the tokenizer returned none
                self._note(EMPTY, row, place)
        if filled:
            self._shard.write(filled)
        self._gathered = []
        self._report(bytes_read, self._shard.n_tokens - before)

    def _encode(self, texts: list[str]) -> Sequence[list[int] | Problem]:
        """Return the ids of each text, or its Problem."""
        if self._encoder is None or not texts:
            return []
        try:
            return self._encoder.ids(texts)
        except InputError:
            return [self._encode_one(text, self._encoder) for text in texts]

    @staticmethod
    def _encode_one(text: str, encoder: Encoder) -> list[int] | Problem:
        try:
            return encoder.ids([text])[0]
        except InputError as error:
            return Problem(str(error).removesuffix("."))


def stop_message(first_bad: str) -> str:
    return f"{first_bad}; correct it, or skip such records with `uptrain prepare --on-bad-record skip`."
