"""Let a model write the text that it is calibrated on: `--calibration self`.

A document begins with the token that stands before a text and a random token of the vocabulary (as in LLM-QAT, Liu et
al. 2023, arXiv:2305.17888, section 3.1), or, every other one, with what a chat template puts before a user's words (as
in Magpie, Xu et al. 2024, arXiv:2406.08464). The model writes on from there. Where it ends a document, or after 256
tokens, the next begins, until the window is full.

    FOLDER/batch-0003.ids     the token ids of a finished batch, int64 [rows, tokens]

A killed run continues with the batch it was at, and gives the same ids: each batch has a seed of its own.
Letters: B rows, T tokens, N windows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from convert.calibration.layer_stream import Progress
from model.checkpoint import Checkpoint
from model.common import console
from model.common.errors import CheckpointError
from model.common.files import copy_file, replace_file
from model.common.tokenizer import open_tokenizer
from model.decoder.config import read_llama_config
from model.decoder.generation import choose, decode
from model.decoder.kv_cache import KVCache
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import embedding_name, load_llama, stop_ids

TEMPERATURE, TOP_P = 1.0, 1.0
"""By docs/study.md, "What the merge is calibrated on"."""
DOCUMENT_TOKENS = 256
"""After which the next document begins: many short ones say more of the model than few long ones."""
BATCH_ROWS = 64
CACHE_BYTES = 4 << 30
"""What the KV cache of a batch may take: where it would take more, fewer rows are written together."""
_MARK = "\N{REPLACEMENT CHARACTER}words\N{REPLACEMENT CHARACTER}"
_TOKENIZER_FILES = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template")


@dataclass(frozen=True)
class OwnText:
    """What a model is to write."""

    checkpoint: Checkpoint
    first: tuple[int, ...]
    """What its tokenizer puts before a text."""
    n_windows: int
    window: int
    """Tokens in each."""
    seed: int

    @property
    def n_tokens(self) -> int:
        return self.n_windows * self.window

    @property
    def memory(self) -> int:
        """Bytes that the model takes with the KV cache and the logits of a batch."""
        weights = sum(tensor.nbytes for tensor in self.checkpoint.tensors.values())
        config = read_llama_config(self.checkpoint.config)
        return weights + self._rows * (self._row_bytes + 3 * 4 * config.vocab_size)

    @property
    def n_steps(self) -> int:
        """How many times the whole model is run, for one token of each row."""
        return -(-self.n_windows // self._rows) * self.window

    def check_memory(self) -> None:
        """Raise CheckpointError where the machine has less memory than the model takes."""
        available = psutil.virtual_memory().available
        if self.memory > available:
            raise CheckpointError(
                f"--calibration self holds the whole model in memory, which takes {self.memory / 1e9:.1f} GB; "
                f"{available / 1e9:.1f} GB are free. Calibrate on a text instead (--calibration shipped, or a file), "
                "which needs one layer at a time, or convert where there is more memory."
            )

    def write(self, folder: Path, progress: Progress) -> NDArray[np.int64]:
        """Return what the model writes, [N, T]. Progress counts tokens.

        Raises CheckpointError where the model cannot be loaded, or makes NaN.
        """
        folder.mkdir(parents=True, exist_ok=True)
        starts = range(0, self.n_windows, self._rows)
        batches = {folder / f"batch-{number:04}.ids": start for number, start in enumerate(starts)}
        left = {file: start for file, start in batches.items() if not file.exists()}
        progress(self.n_tokens - sum(self._rows_from(start) * self.window for start in left.values()))
        if left:
            writer = _Writer(self.checkpoint, self.first)
            for file, start in left.items():
                ids_BT = writer.write(self._rows_from(start), self.window, (self.seed, start), progress)
                replace_file(file, ids_BT.tobytes())
        found = [np.frombuffer(file.read_bytes(), np.int64) for file in batches]
        return np.concatenate(found).reshape(self.n_windows, self.window)

    @property
    def _row_bytes(self) -> int:
        """Bytes that a row's KV cache takes."""
        config = read_llama_config(self.checkpoint.config)
        bytes_per_value = max(t.nbytes // prod(t.shape) for t in self.checkpoint.tensors.values() if t.shape)
        return 2 * config.n_layers * config.n_kv_heads * config.head_dim * self.window * bytes_per_value

    @property
    def _rows(self) -> int:
        """How many rows are written together. It does not depend on the machine, since the ids depend on it."""
        return max(1, min(BATCH_ROWS, self.n_windows, CACHE_BYTES // self._row_bytes))

    def _rows_from(self, start: int) -> int:
        return min(self._rows, self.n_windows - start)


class _Writer:
    """A model in memory, and what its documents begin with."""

    def __init__(self, checkpoint: Checkpoint, first: Sequence[int]) -> None:
        self._model: LlamaForCausalLM = load_llama(checkpoint, None, "cpu")
        self._ends = frozenset(stop_ids(checkpoint))
        self._first = tuple(first) or _token_before_texts(checkpoint) or tuple(sorted(self._ends))[:1]
        self._chat, vocabulary = _read_tokenizer(checkpoint)
        n_ids = checkpoint.tensors[embedding_name(checkpoint)].shape[0]
        for token in (*self._first, *(token for part in self._chat for token in part)):
            if token >= n_ids:
                raise CheckpointError(
                    f"the tokenizer and config.json name the id {token}, but the model has {n_ids} tokens; they do not "
                    "belong together."
                )
        self._vocabulary = [token for token in vocabulary if token < n_ids]

    @torch.inference_mode()
    def write(self, n_rows: int, window: int, seed: tuple[int, int], progress: Progress) -> NDArray[np.int64]:
        """Return rows of so many tokens, [B, T]."""
        config, weight = self._model.config, self._model.head_weight
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
        beginnings = self._beginnings(rng)
        rows = [_Row(beginnings, self._ends) for _ in range(n_rows)]
        cache = KVCache(config, n_rows, window, weight.dtype, weight.device)
        ids_BT = np.empty((n_rows, window), dtype=np.int64)
        chosen_B: Sequence[int | None] = [None] * n_rows
        for t in range(window):
            ids_BT[:, t] = [row.next_token(chosen) for row, chosen in zip(rows, chosen_B, strict=True)]
            logits_BV = decode(self._model, torch.from_numpy(ids_BT[:, t]), cache)
            if not logits_BV.isfinite().all():
                raise CheckpointError("the model makes NaN or infinite values of its own text; it is damaged.")
            chosen_B = choose(logits_BV, TEMPERATURE, TOP_P, generator).tolist()
            progress(n_rows)
        return ids_BT

    def _beginnings(self, rng: np.random.Generator) -> Iterator[list[list[int]]]:
        """Yield what to give of one document after another: at its beginning, and each time the model ends a part."""
        while True:
            yield [[*self._first, int(rng.choice(self._vocabulary))]]
            if self._chat:
                yield [list(part) for part in self._chat]


class _Row:
    """A window that is being written: which tokens are given, and which are the model's choice."""

    def __init__(self, beginnings: Iterator[list[list[int]]], ends: frozenset[int]) -> None:
        self._beginnings, self._ends = beginnings, ends
        self._parts: list[list[int]] = []
        self._given: list[int] = []
        self._length = 0

    def next_token(self, chosen: int | None) -> int:
        """Return the token that comes next; `chosen` is the model's, None at the beginning."""
        if not self._given and (chosen is None or self._length >= DOCUMENT_TOKENS):
            self._begin()
        elif not self._given and chosen in self._ends:
            assert chosen is not None
            if not self._parts:
                self._begin()
            self._given = [chosen, *(self._given or self._parts.pop(0))]
        self._length += 1
        following = self._given.pop(0) if self._given else chosen
        assert following is not None, "documents begin with at least one given token"
        return following

    def _begin(self) -> None:
        self._given, *self._parts = next(self._beginnings)
        self._length = 0


def _token_before_texts(checkpoint: Checkpoint) -> tuple[int, ...]:
    found = checkpoint.config.get("bos_token_id")
    return (found,) if type(found) is int and found >= 0 else ()


def _read_tokenizer(checkpoint: Checkpoint) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Return what the chat template puts before a user's words and before the answer, and the ids of ordinary tokens.

    Without a template, the former is empty.
    """
    with TemporaryDirectory() as folder:
        for name, content in checkpoint.side_files.items():
            if name.startswith(_TOKENIZER_FILES):
                copy_file(content, Path(folder) / name)
        tokenizer: Any = open_tokenizer(Path(folder))
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - special)
    if not tokenizer.chat_template:
        return (), vocabulary
    try:
        chat = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
        parts = str(tokenizer.apply_chat_template(chat, tokenize=False)).split(_MARK)
    except Exception as error:  # a template may raise what it likes
        console.warn(f"the chat template cannot be used ({error}); no text begins with it.")
        return (), vocabulary
    if len(parts) != 3:
        console.warn("the chat template leaves out what a user says; no text begins with it.")
        return (), vocabulary
    before, between, _ = (tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in parts)
    # The model itself writes the token that ends the user's words.
    return (before, between[1:] if between and between[0] in special else between), vocabulary
