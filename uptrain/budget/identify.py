"""Identify the original of a checkpoint by its shape and the source names that its conversion recorded."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from model.common.read_files import CONFIG_BYTES, RECORD_FILE, read_bytes_up_to
from uptrain.budget.pretraining import ORIGINALS, PretrainingRecord

SHAPE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def named(name: str) -> PretrainingRecord:
    """Return the original that `--original` names."""
    for original in ORIGINALS:
        if original.name == name:
            return original
    raise InputError(f"--original {name}: unknown; known are {', '.join(o.name for o in ORIGINALS)}.")


def known_originals(config: Mapping[str, Any], source_names: Iterable[str]) -> tuple[PretrainingRecord, ...]:
    """Return the originals with the model's shape; if some of them also match its names, return only these.

    `config` is its `config.json`; `source_names` are from `source_names`. A name without the shape does not count,
    since names are arbitrary.
    """
    model_type = str(config.get("model_type")).removesuffix("_gqa")  # suffix of the classes in `model.remote_code`
    shape = (model_type, *(config.get(key) for key in SHAPE_KEYS))
    of_shape = tuple(original for original in ORIGINALS if original.shape == shape)
    last_parts = [name.lower().rsplit("/", 1)[-1] for name in source_names]
    of_name = tuple(o for o in of_shape if any(re.fullmatch(o.pattern, part) for part in last_parts))
    return of_name or of_shape


def source_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the folder's sources, latest conversion first, from `groupwise.json`; else its own name."""
    from model.checkpoint.hub import origin_of  # imports numpy, which the command line does not need to start

    return tuple(name for name, *_ in _conversions(folder)) or (origin_of(folder)[0],)


def merge_method(folder: Path) -> str | None:
    """Return the method of the folder's last conversion, from `groupwise.json`; None without one."""
    return next((method for _, method, _ in _conversions(folder)), None)


def changed_tensors(folder: Path) -> tuple[str, ...]:
    """Return the tensors of layers that the folder's last conversion merged whole, from `groupwise.json`."""
    return next((changed for *_, changed in _conversions(folder)), ())


def default_trainable(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the default of `--trainable`: what the conversion changed, `attention`, or `all` for any other model.

    Also `all` if the names of the model's attention are not known.
    """
    from uptrain.training.parts import knows_attention  # imports numpy, which the command line does not need to start

    return "attention" if knows_attention(config) and merge_method(folder) is not None else "all"


def _conversions(folder: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return source name, method and tensors merged whole of each conversion, the last one first."""
    path = folder / RECORD_FILE
    if not path.is_file():
        return []
    content = read_bytes_up_to(path, CONFIG_BYTES)
    try:
        record: Any = json.loads(content)
        conversions = []
        while record is not None:
            changed = tuple(map(str, record.get("sha256") or ()))
            conversions.append((str(record["source"]["name"]), str(record.get("method")), changed))
            record = record["source"].get("groupwise")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error!r}; convert the model again, or remove the file.") from error
    return conversions
