"""Load the tokenizer of a Hugging Face folder, compute its fingerprint, and encode documents.

A document's ids are the tokenizer's own output, including the special tokens that it adds. If the tokenizer has an
end-of-sequence token, it is appended to ids that do not end with it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from model.common.errors import InputError
from model.common.files import file_sha256
from model.common.read_files import read_json
from model.common.tokenizer import CONFIGS, VOCABULARIES, WHOLE, check_files, open_tokenizer

SETTINGS = (
    "tokenizer_class", "bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token", "add_prefix_space",
    "legacy", "do_lower_case", "split_special_tokens", "added_tokens_decoder", "additional_special_tokens",
    "extra_special_tokens",
)  # fmt: skip
"""Keys of CONFIGS that can change ids, unlike chat templates, lengths, names and padding."""


def tokenizer_sha256(folder: Path) -> str:
    """Return the fingerprint of a folder's tokenizer: a hash of the files and settings that determine ids.

    Equal files have equal fingerprints, regardless of other files in their folders. The reverse does not hold: another
    version of transformers may save the same tokenizer differently. Raises InputError if there is no tokenizer.
    """
    names = [WHOLE] if (folder / WHOLE).is_file() else [name for name in VOCABULARIES if (folder / name).is_file()]
    if not names:
        raise InputError(
            f"{folder} holds no tokenizer ({WHOLE} or {VOCABULARIES[0]}); put the tokenizer's files there."
        )
    check_files(folder)
    files = {name: file_sha256(folder / name) for name in names}
    merged = {key: value for name in CONFIGS for key, value in _read_config(folder / name).items()}
    settings = {name: merged[name] for name in SETTINGS if merged.get(name) is not None}
    return hashlib.sha256(json.dumps([files, settings], sort_keys=True).encode()).hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a JSON object; fetch the tokenizer anew.")
    return config


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
    sha256: str


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer with transformers, from local files only. Raises InputError if it is unusable."""
    sha256 = tokenizer_sha256(folder)
    loaded = open_tokenizer(folder)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{folder} has a tokenizer written in Python ({type(loaded).__name__}); give one with a {WHOLE}."
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        backend.to_str(), bool(loaded.split_special_tokens), loaded.eos_token_id, max(vocabulary.values()) + 1, sha256
    )


class Encoder:
    """Encode documents as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = Backend.from_str(tokenizer.backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.splits_special
        self._eos_id = tokenizer.eos_id

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text; the list may be empty. Raises InputError if the tokenizer cannot encode one."""
        try:
            ids_of_texts = [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]
        except Exception as error:  # the library raises no narrower class
            raise InputError(f"the tokenizer cannot encode the text ({error}).") from error
        if self._eos_id is not None:
            for ids in ids_of_texts:
                if not ids or ids[-1] != self._eos_id:
                    ids.append(self._eos_id)
        return ids_of_texts
