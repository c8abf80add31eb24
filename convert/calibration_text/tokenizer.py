"""Open a checkpoint's tokenizer, from tokenizer.json or from the other files that transformers reads."""

from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from convert.errors import NO_TORCH, UnsupportedMethodError
from model.checkpoint import Checkpoint
from model.checkpoint.hub import origin_of
from model.common.errors import CheckpointError, InputError
from model.common.typed_json import parse_object
from model.files.read import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, read_content
from model.files.write import copy_file, write_file
from model.tokenizer import (
    TOKENIZER_FILE_PREFIXES,
    TOKENIZER_JSON,
    VOCABULARIES,
    find_leading_ids,
    has_tokenizer,
    is_tiktoken,
    open_tokenizer,
    put_bos_first,
    refusing_tokenizer_errors,
    without_dropout,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_WITHOUT_FILE = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizers of bytes or characters, of which transformers writes no tokenizer.json."""


def open_fast_tokenizer(checkpoint: Checkpoint) -> "Tokenizer":
    """Return the tokenizer of a checkpoint, which neither cuts nor pads texts.

    Raises UnsupportedMethodError if it has none that can be opened, CheckpointError if tokenizer.json is damaged.
    """
    content = checkpoint.side_files.get(TOKENIZER_JSON)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedMethodError(NO_TORCH) from error
    if content is None:
        tokenizer = _without_tokenizer_json(checkpoint)
    else:
        text = read_content(content, MAX_TOKENIZER_BYTES)
        with refusing_tokenizer_errors(f"{checkpoint.path}/{TOKENIZER_JSON} is damaged", CheckpointError):
            tokenizer = Tokenizer.from_str(text.decode())
        without_dropout(tokenizer)
        put_bos_first(tokenizer, _tokenizer_config(checkpoint), checkpoint.config)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return tokenizer_config.json; an empty object if there is none."""
    content = checkpoint.side_files.get("tokenizer_config.json", b"{}")
    try:
        return parse_object(read_content(content, MAX_CONFIG_BYTES))
    except InputError as error:
        raise CheckpointError(f"{checkpoint.path}/tokenizer_config.json: {error}") from error


def _without_tokenizer_json(checkpoint: Checkpoint) -> "Tokenizer":
    """Return the tokenizer that transformers makes of other files, such as the tokenizer.model of a Vicuna."""
    save = "save the tokenizer there (transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))"
    of_ids = "or give a text of token ids with --calibration"
    advice = f"{save}, {of_ids}"
    refusal = f"{checkpoint.path} has no {TOKENIZER_JSON}, which calibrating needs"
    if links := unfollowed_tokenizer_links(checkpoint):  # transformers would write the tokenizer to where they lead
        raise UnsupportedMethodError(
            f"{checkpoint.config_folder / links[0]}, which calibrating needs, is a link out of the folder, which is "
            f"not followed; put the file itself there, or give a text of token ids with --calibration."
        )
    if not any(name in checkpoint.side_files for name in VOCABULARIES):  # transformers would make an empty one
        name = cached_without_tokenizer(checkpoint)
        if _tokenizer_config(checkpoint).get("tokenizer_class") in _WITHOUT_FILE:
            advice = of_ids.removeprefix("or ")
        if name is not None:
            advice = f"fetch all files of the model: hf download {name}; {of_ids}"
        raise UnsupportedMethodError(f"{refusal}; {advice}.")
    content = checkpoint.side_files.get("tokenizer.model")
    if content is not None and is_tiktoken(content):  # transformers would not know its special tokens
        raise UnsupportedMethodError(f"{refusal}: its tokenizer.model is a file of tiktoken; {advice}.")
    try:
        backend: Tokenizer | None = getattr(open_hf_tokenizer(checkpoint), "backend_tokenizer", None)
    except CheckpointError as error:
        raise UnsupportedMethodError(f"{refusal}: {str(error).rstrip('.')}; {of_ids}.") from error
    if backend is None:
        raise UnsupportedMethodError(f"{refusal}, and transformers makes none of the other files; {advice}.")
    return backend


def unfollowed_tokenizer_links(checkpoint: Checkpoint) -> list[str]:
    """Return the names of a tokenizer's files that are links which are not followed, so that OUT lacks them."""
    names = (TOKENIZER_JSON, *VOCABULARIES)
    return [n for n in names if (checkpoint.config_folder / n).is_symlink() and n not in checkpoint.side_files]


def cached_without_tokenizer(checkpoint: Checkpoint) -> str | None:
    """Return the name of a model on the hub, if programs have fetched it into the cache without its tokenizer."""
    name, commit = origin_of(checkpoint.path)
    return None if commit is None or has_tokenizer(checkpoint.side_files) else name


def open_hf_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return transformers' tokenizer of a checkpoint. Raises CheckpointError if transformers cannot open its files.

    Without tokenizer.json, the config says which class makes the tokenizer of the other files.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        if TOKENIZER_JSON not in checkpoint.side_files:
            write_file(folder / "config.json", checkpoint.config_bytes)
        for file, content in checkpoint.side_files.items():
            if file in VOCABULARIES or file.startswith(TOKENIZER_FILE_PREFIXES):
                copy_file(content, folder / file)
        try:
            return open_tokenizer(folder)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(name, str(checkpoint.path))) from error


def find_bos_ids(tokenizer: "Tokenizer", checkpoint: Checkpoint) -> list[int]:
    """Return the tokens that the tokenizer puts before a text: a beginning-of-text token, or none."""
    with _refusing_texts(checkpoint):
        return find_leading_ids(tokenizer)


def encode(tokenizer: "Tokenizer", text: str, checkpoint: Checkpoint) -> list[int]:
    """Return the token ids of a text, without the tokens that the tokenizer adds."""
    with _refusing_texts(checkpoint):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _refusing_texts(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    message = f"the tokenizer of {checkpoint.path} cannot read the calibration text"
    return refusing_tokenizer_errors(message, UnsupportedMethodError)
