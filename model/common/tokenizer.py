"""Open a folder's tokenizer with transformers, without ever running code that comes with the folder."""

from pathlib import Path
from typing import Any

from model.common.errors import CheckpointError
from model.common.read_files import CONFIG_BYTES, TOKENIZER_BYTES, check_size, read_json

WHOLE = "tokenizer.json"
"""Holds a fast tokenizer entirely; where it is, the vocabularies of slow ones beside it are not read."""
VOCABULARIES = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt",
    "added_tokens.json",
)  # fmt: skip
CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")


def open_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder, from the folder's own files alone.

    Where the folder names code of its own (`auto_map`), that code is not run, and transformers is asked for a class of
    its own; where it has none, tokenizer.json is opened as it is. Raises CheckpointError if there is no such file
    either, or if transformers cannot read what there is.
    """
    check_sizes(folder)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    code = _own_code(folder)
    openers: list[Any] = [AutoTokenizer]
    if code and (folder / WHOLE).is_file():
        openers.append(PreTrainedTokenizerFast)
    why: Exception | None = None
    for opener in openers:
        try:
            return opener.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # what transformers and tokenizers raise for damaged files is of all kinds
            why = error
    if code and len(openers) == 1:
        raise CheckpointError(
            f"the tokenizer of {folder} needs code of its own ({code}), which is never run; put a {WHOLE} there (save "
            "the tokenizer as a fast one with transformers), or give a folder that has one."
        ) from why
    raise CheckpointError(f"transformers cannot load the tokenizer of {folder}: {_one_line(why, folder)}") from why


def check_sizes(folder: Path) -> None:
    """Raise CheckpointError if a file that transformers reads whole is no regular file, or enormous."""
    limits = dict.fromkeys((WHOLE, *VOCABULARIES), TOKENIZER_BYTES)
    limits |= dict.fromkeys((*CONFIGS, "config.json", "chat_template.jinja", "chat_template.json"), CONFIG_BYTES)
    for name, limit in limits.items():
        if (folder / name).exists():
            check_size(folder / name, limit)


def _own_code(folder: Path) -> str:
    """Return what the folder's configs name as the code of its tokenizer, such as `tokenization_x.XTokenizer`."""
    for name in ("tokenizer_config.json", "config.json"):
        config = read_json(folder / name) if (folder / name).exists() else None
        table = config.get("auto_map") if isinstance(config, dict) else None
        named = table.get("AutoTokenizer") if isinstance(table, dict) else table
        found = next((part for part in named if part), None) if isinstance(named, list) else named
        if found:
            return str(found)
    return ""


def _one_line(error: Exception | None, folder: Path) -> str:
    """Say what transformers stopped at. Without these packages it asks for a third, which does not help."""
    why = " ".join(str(error).split())
    if (folder / "tokenizer.model").is_file() and not (folder / WHOLE).is_file():
        return f"there is no {WHOLE}, and tokenizer.model needs `pip install sentencepiece protobuf` ({why})"
    return why
