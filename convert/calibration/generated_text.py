"""Let the model generate its own calibration text: `--calibration self`.

A document begins with the beginning-of-text token and a random token of the vocabulary (as in LLM-QAT, Liu et al. 2023,
arXiv:2305.17888, section 3.1). With a chat template, every other document begins instead with the template's tokens
before the user's message (as in Magpie, Xu et al. 2024, arXiv:2406.08464). The model generates the rest. The next
document begins where the model ends one, or after 256 tokens, until the window is full.

    FOLDER/batch-0003.ids     the token ids of a finished batch, int64 [rows, tokens]

A killed run resumes at the batch it had reached. Each batch has its own seed, so the ids are the same.
Letters: B rows, T tokens, N windows, V vocabulary.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from convert.calibration_text.text import CalibrationText
from convert.calibration_text.tokenizer import open_hf_tokenizer
from convert.layers.incremental_decoder import IncrementalDecoder, open_model
from model.checkpoint import Checkpoint
from model.checkpoint.tied import EMBEDDING, LM_HEAD
from model.common import console
from model.common.console import Advance
from model.common.errors import CheckpointError
from model.decoder.config import is_native
from model.decoder.devices import free_memory, out_of_memory_as_run_error
from model.decoder.generation import sample
from model.decoder.loading import stop_ids
from model.files.write import file_sha256, replace_file
from model.geometry import read_geometry
from model.tokenizer import TOKENIZER_FILE_PREFIXES, VOCABULARIES

TEMPERATURE, TOP_P = 1.0, 1.0
"""Chosen by docs/study.md, "What the merge is calibrated on"."""
DOCUMENT_TOKENS = 256
"""Maximum tokens per document. Many short documents represent the model better than few long ones."""
BATCH_ROWS = 64
CACHE_BYTES = 4 << 30
"""Maximum bytes of a batch's KV cache. It limits the rows per batch."""
_MARK = "\N{REPLACEMENT CHARACTER}words\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TextGeneration:
    """A request for text that the model generates itself."""

    checkpoint: Checkpoint
    bos_ids: tuple[int, ...]
    """Tokens that its tokenizer puts before a text."""
    n_windows: int
    window_tokens: int
    """Tokens per window."""
    seed: int
    device: str = "cpu"
    """The device of the model. Tokens are drawn on the CPU."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, text: CalibrationText, seed: int, device: str = "cpu") -> "TextGeneration":
        """Return the request for the windows of a calibration text that the model generates."""
        return cls(checkpoint, text.bos_ids, len(text.generated), text.window_tokens, seed, device)

    @property
    def n_tokens(self) -> int:
        return self.n_windows * self.window_tokens

    def memory(self, n_embeddings: int) -> int:
        """Return the bytes of the model's weights, and of a batch's KV cache and logits."""
        tensors = self.checkpoint.tensors
        weights = sum(tensor.nbytes for tensor in tensors.values())
        if (
            self.device == "cpu"
            and is_native(self.checkpoint.config)
            and EMBEDDING in tensors
            and LM_HEAD not in tensors
        ):
            weights += tensors[EMBEDDING].nbytes  # `LlamaForCausalLM.prepack` copies a tied LM head
        return weights + self._rows * (self._row_bytes + 3 * 4 * n_embeddings)

    @property
    def n_steps(self) -> int:
        """Number of runs of the whole model. Each run gives one token per row."""
        return -(-self.n_windows // self._rows) * self.window_tokens

    @property
    def inputs_sha256(self) -> str:
        """SHA-256 of the files that the text depends on besides the weights and config, and of its first tokens."""
        digest = hashlib.sha256(repr(self.bos_ids).encode())
        for name, content in sorted(self.checkpoint.side_files.items()):
            if name in VOCABULARIES or name.startswith((*TOKENIZER_FILE_PREFIXES, "generation_config.json")):
                digest.update(f"\n{name} ".encode())
                digest.update(content if isinstance(content, bytes) else file_sha256(content).encode())
        return digest.hexdigest()

    def check_memory(self, n_embeddings: int) -> None:
        """Raise CheckpointError if the device has less free memory than `memory`."""
        needed = self.memory(n_embeddings)
        available = free_memory(torch.device(self.device))
        if needed > available:
            raise CheckpointError(
                f"--calibration self holds the whole model in memory, which takes {needed / 1e9:.1f} GB; "
                f"{available / 1e9:.1f} GB are free. Calibrate on a text instead (--calibration shipped, or a file), "
                "which needs one layer at a time, or convert where there is more memory."
            )

    def generate(self, folder: Path, advance: Advance) -> NDArray[np.int64]:
        """Return the token ids that the model generates, [N, T]. `advance` counts tokens.

        Raises CheckpointError if the model cannot be loaded, or its logits are not finite.
        """
        folder.mkdir(parents=True, exist_ok=True)
        starts = range(0, self.n_windows, self._rows)
        batches = {folder / f"batch-{number:04}.ids": start for number, start in enumerate(starts)}
        missing = {file: start for file, start in batches.items() if not file.exists()}
        advance(self.n_tokens - sum(self._rows_from(start) * self.window_tokens for start in missing.values()))
        if missing:
            with out_of_memory_as_run_error(self.device):
                generator = _Generator(self.checkpoint, self.bos_ids, self.device)
                for file, start in missing.items():
                    ids_BT = generator.generate(self._rows_from(start), self.window_tokens, (self.seed, start), advance)
                    replace_file(file, ids_BT.tobytes())
        ids = [np.frombuffer(file.read_bytes(), np.int64) for file in batches]
        return np.concatenate(ids).reshape(self.n_windows, self.window_tokens)

    @cached_property
    def _row_bytes(self) -> int:
        """Bytes of one row's KV cache."""
        geometry = read_geometry(self.checkpoint)
        bytes_per_value = max(t.nbytes // prod(t.shape) for t in self.checkpoint.tensors.values() if 0 not in t.shape)
        return self.window_tokens * geometry.kv_cache_bytes_per_token(geometry.n_kv_heads, bytes_per_value)

    @cached_property
    def _rows(self) -> int:
        """Rows per batch. It must not depend on the machine, because the ids depend on it."""
        return max(1, min(BATCH_ROWS, self.n_windows, CACHE_BYTES // self._row_bytes))

    def _rows_from(self, start: int) -> int:
        return min(self._rows, self.n_windows - start)


class _Generator:
    """A model in memory, and the tokens that its documents begin with."""

    def __init__(self, checkpoint: Checkpoint, first: Sequence[int], device: str) -> None:
        self._model: IncrementalDecoder = open_model(checkpoint, device)
        self._ends = frozenset(stop_ids(checkpoint))
        bos = checkpoint.config.get("bos_token_id")
        of_config = (bos,) if type(bos) is int and bos >= 0 else ()
        self._first = tuple(first) or of_config or tuple(sorted(self._ends))[:1]
        self._chat, vocabulary = _read_tokenizer(checkpoint)
        n_ids = self._model.n_embeddings
        for token in (*self._first, *(token for part in self._chat for token in part)):
            if token >= n_ids:
                raise CheckpointError(
                    f"the tokenizer and config.json name the id {token}, but the model has a vocabulary of {n_ids:,}; "
                    "they do not belong together."
                )
        self._vocabulary = [token for token in vocabulary if token < n_ids]
        if not self._vocabulary:
            raise CheckpointError(
                "the tokenizer has no ordinary token that the model's embedding holds, so the model cannot write a "
                "text; calibrate on a text instead: --calibration shipped, or a file."
            )

    @torch.inference_mode()
    def generate(self, n_rows: int, window_tokens: int, seed: tuple[int, int], advance: Advance) -> NDArray[np.int64]:
        """Return `n_rows` rows of `window_tokens` tokens, [B, T]."""
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
        beginnings = self._beginnings(rng)
        rows = [_Row(beginnings, self._ends) for _ in range(n_rows)]
        self._model.begin(n_rows, window_tokens)
        ids_BT = np.empty((n_rows, window_tokens), dtype=np.int64)
        chosen_B: Sequence[int | None] = [None] * n_rows
        for t in range(window_tokens):
            ids_BT[:, t] = [row.next_token(chosen) for row, chosen in zip(rows, chosen_B, strict=True)]
            logits_BV = self._model.append(torch.from_numpy(ids_BT[:, t]))
            if not logits_BV.isfinite().all():
                raise CheckpointError("the model's logits are NaN or infinite; the checkpoint is damaged.")
            chosen_B = sample(logits_BV, TEMPERATURE, TOP_P, generator).tolist()
            advance(n_rows)
        return ids_BT

    def _beginnings(self, rng: np.random.Generator) -> Iterator[list[list[int]]]:
        """Yield each document's prompts: one for its beginning, and one for each time the model ends a part."""
        while True:
            yield [[*self._first, int(rng.choice(self._vocabulary))]]
            if self._chat:
                before, *others = map(list, self._chat)
                yield [before or [*self._first, int(rng.choice(self._vocabulary))], *others]


class _Row:
    """A window that is being generated, from prompt tokens and tokens chosen by the model."""

    def __init__(self, beginnings: Iterator[list[list[int]]], ends: frozenset[int]) -> None:
        self._beginnings, self._ends = beginnings, ends
        self._parts: list[list[int]] = []
        self._prompt: list[int] = []
        self._length = 0

    def next_token(self, chosen: int | None) -> int:
        """Return the next token. `chosen` is the model's choice, None at the beginning of the window."""
        if not self._prompt:
            if chosen is None or self._length >= DOCUMENT_TOKENS:
                self._prompt = self._begin_document()
            elif chosen in self._ends:
                self._prompt = [chosen, *(self._parts.pop(0) if self._parts else self._begin_document())]
        self._length += 1
        following = self._prompt.pop(0) if self._prompt else chosen
        assert following is not None, "a document's prompt has at least one token"
        return following

    def _begin_document(self) -> list[int]:
        """Return the prompt that a new document begins with."""
        prompt, *self._parts = next(self._beginnings)
        self._length = 0
        return prompt


def _read_tokenizer(checkpoint: Checkpoint) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Return the chat template's tokens before the user's message and before the answer, and the ordinary token ids.

    Without a template, the first tuple is empty.
    """
    tokenizer: Any = open_hf_tokenizer(checkpoint)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - special)
    if not tokenizer.chat_template:
        return (), vocabulary
    try:
        chat = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
        parts = str(tokenizer.apply_chat_template(chat, tokenize=False)).split(_MARK)
    except Exception as error:  # a template may raise any exception
        console.warn(f"the chat template cannot be used ({error}); no text begins with it.")
        return (), vocabulary
    if len(parts) != 3:
        console.warn("the chat template leaves out what a user says; no text begins with it.")
        return (), vocabulary
    before, between, _ = (tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in parts)
    # The model itself generates the token that ends the user's message.
    return (before, between[1:] if between and between[0] in special else between), vocabulary
