"""The tokenizer of a Hugging Face folder: its identity, and the ids it gives a document.

A document's ids are what the tokenizer itself gives its text, with the special tokens it adds by itself, and the
end-of-sequence token last, if there is one and it is not there yet.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from model.common.errors import InputError
from model.common.read_files import read_json
from model.common.tokenizer import CONFIGS, VOCABULARIES, WHOLE, check_sizes, open_tokenizer

SETTINGS = (
    "tokenizer_class", "bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token", "add_prefix_space",
    "legacy", "do_lower_case", "split_special_tokens", "added_tokens_decoder", "additional_special_tokens",
    "extra_special_tokens",
)  # fmt: skip
"""What in CONFIGS can change ids; chat templates, lengths, names and padding cannot."""


def tokenizer_sha256(folder: Path) -> str:
    """Return the identity of a folder's tokenizer: a hash of the files and settings that decide which ids it gives.

    Equal files have equal identities, whatever else is in their folders. The reverse does not hold: the same tokenizer
    saved anew by another version of transformers may be written otherwise. Raises InputError if there is none.
    """
    names = [WHOLE] if (folder / WHOLE).is_file() else [name for name in VOCABULARIES if (folder / name).is_file()]
    if not names:
        raise InputError(
            f"{folder} holds no tokenizer ({WHOLE} or {VOCABULARIES[0]}); put the tokenizer's files there."
        )
    check_sizes(folder)
    files = {name: _sha256(folder / name) for name in names}
    merged = {key: value for name in CONFIGS for key, value in _read_config(folder / name).items()}
    settings = {name: merged[name] for name in SETTINGS if merged.get(name) is not None}
    return hashlib.sha256(json.dumps([files, settings], sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a JSON object; fetch the tokenizer anew.")
    return config


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as a few plain values, which every worker process makes its own encoder of."""

    backend: str
    """The fast tokenizer as JSON, after all that transformers makes of the folder."""
    splits_special: bool
    """Whether a special token that is written out in a text is text like any other."""
    eos_id: int | None
    vocab_size: int
    """One more than the highest id."""
    sha256: str


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a folder's tokenizer with transformers, from local files alone. Raises InputError if it cannot be used."""
    identity = tokenizer_sha256(folder)
    loaded = open_tokenizer(folder)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{folder} has a tokenizer written in Python ({type(loaded).__name__}); give one with a {WHOLE}."
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        backend.to_str(), bool(loaded.split_special_tokens), loaded.eos_token_id, max(vocabulary.values()) + 1, identity
    )


class Encoder:
    """Gives documents their ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = Backend.from_str(tokenizer.backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.splits_special
        self._eos_id = tokenizer.eos_id

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, which may be none."""
        found = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        if self._eos_id is not None:
            for ids in found:
                if not ids or ids[-1] != self._eos_id:
                    ids.append(self._eos_id)
        return found
