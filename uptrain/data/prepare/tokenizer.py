"""Load the tokenizer of a Hugging Face folder, and encode documents.

A document's ids are the tokenizer's own output, including the special tokens that it adds. If the tokenizer has an
end-of-sequence token, it is appended to ids that do not end with it. What a chat template has written into a text is
not added again: special tokens at its start, and an end-of-sequence token with white space after it. Nor by a
tokenizer that appends this token itself.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend

from model.common.errors import InputError
from model.tokenizer import TOKENIZER_JSON, VOCABULARIES, find_leading_ids, open_tokenizer, refusing_tokenizer_errors

MAX_WHITE_SPACE = 2
"""Tokens of white space that may follow an end-of-sequence token in a text."""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer as plain values, from which every worker process makes its own Encoder."""

    backend: str
    """JSON of the fast tokenizer, as transformers loads it from the folder."""
    splits_special: bool
    """Whether special tokens that occur in a text are encoded as plain text."""
    eos_id: int | None
    vocab_size: int
    """Highest id + 1."""

    @property
    def sha256(self) -> str:
        """Fingerprint: a hash of all that determines ids.

        Equal fingerprints mean equal ids of every text. Files are not compared: the class that transformers chooses,
        also by `config.json`, decides on special tokens, so equal files may give other ids, and different files the
        same. The reverse does not hold: another version of tokenizers may serialise the same tokenizer differently.
        """
        backend = json.loads(self.backend)
        for unused in ("truncation", "padding"):  # see Encoder
            backend.pop(unused, None)
        hashed = [backend, self.splits_special, self.eos_id]
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer with transformers, from local files only. Raises InputError if it is unusable."""
    if not any((folder / name).is_file() for name in (TOKENIZER_JSON, *VOCABULARIES)):
        raise InputError(
            f"{folder} holds no tokenizer ({TOKENIZER_JSON} or {VOCABULARIES[0]}); put the tokenizer's files there."
        )
    loaded = open_tokenizer(folder)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{folder} has a tokenizer written in Python ({type(loaded).__name__}); give one with a {TOKENIZER_JSON}."
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise InputError(f"the tokenizer of {folder} has an empty vocabulary; put the model's {TOKENIZER_JSON} there.")
    return Tokenizer(
        backend.to_str(), bool(loaded.split_special_tokens), loaded.eos_token_id, max(vocabulary.values()) + 1
    )


class Encoder:
    """Encode documents as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = Backend.from_str(tokenizer.backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.splits_special
        self._eos_id = tokenizer.eos_id
        self._start = find_leading_ids(self._backend)
        self._appends_eos = self._backend.encode("a").ids[-1:] == [self._eos_id]

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text; the list may be empty. Raises InputError if the tokenizer cannot encode one."""
        with refusing_tokenizer_errors("the tokenizer cannot encode the text"):
            ids_of_texts = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        for ids in ids_of_texts:
            n = len(self._start)
            if n and ids[:n] == ids[n : 2 * n] == self._start:
                del ids[:n]
            if self._appends_eos and self._is_ended(ids[:-1]):
                ids.pop()
            if self._eos_id is not None and not self._is_ended(ids):
                ids.append(self._eos_id)
        return ids_of_texts

    def _is_ended(self, ids: list[int]) -> bool:
        """Return whether nothing but white space follows an end-of-sequence token: ChatML writes a line break there."""
        begun = len(self._start) if len(ids) > len(self._start) else 0  # the beginning may be the same token
        for n in range(min(MAX_WHITE_SPACE + 1, len(ids) - begun)):
            if ids[-1 - n] == self._eos_id:
                return not self._backend.decode(ids[len(ids) - n :], skip_special_tokens=False).strip()
        return False
