"""Identify the original of a checkpoint by its shape and its names."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from model.common.errors import InputError
from uptrain.budget.pretraining import ORIGINALS, PretrainingRecord

SHAPE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def find_original(name: str) -> PretrainingRecord:
    """Return the original that `--original` names. Raises InputError for an unknown name."""
    for original in ORIGINALS:
        if original.name == name:
            return original
    known = [original.name for original in ORIGINALS]
    near = get_close_matches(name.lower(), known, 1)
    meant = f"did you mean {near[0]}? Known" if near else "known"
    raise InputError(f"--original {name}: unknown; {meant} are {', '.join(known)}.")


def check_shape(config: Mapping[str, Any], name: str) -> None:
    """Raise InputError if the original that `--original` names has other layers than a model's `config.json`.

    Another vocabulary is possible, since fine-tuning may add tokens: see `shape_warning`.
    """
    differing = _differing(config, name)
    if differing.keys() - {"vocab_size"}:
        raise InputError(
            f"--original {name} has another shape than the model ({'; '.join([*differing.values()][:2])}), so it is "
            "not its parent's pre-training; leave --original out. To use its numbers all the same, give them as "
            "--original-tokens, --global-batch-tokens and --lr."
        )


def shape_warning(config: Mapping[str, Any], name: str | None) -> str | None:
    """Return a warning if the original that `--original` names has another shape than a model's `config.json`."""
    if name is None or not (differing := [*_differing(config, name).values()]):
        return None
    return f"--original {name} has another shape than the model ({'; '.join(differing[:2])}): is it its parent?"


def _differing(config: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return by key in what the shape of an original differs from a model's `config.json`."""
    original = dict(zip(SHAPE_KEYS, find_original(name).shape[1:], strict=True))
    return {
        key: f"{key} {theirs:,}, not {config[key]:,}"
        for key in _kept_keys(config)
        if isinstance(config.get(key), int) and isinstance(theirs := original[key], int) and config[key] != theirs
    }


def known_originals(config: Mapping[str, Any], source_names: Iterable[str]) -> tuple[PretrainingRecord, ...]:
    """Return the originals with the model's shape; if some of them also match its names, return only these.

    `config` is its `config.json`; `source_names` are from `uptrain.budget.conversion_record`. A name without the shape
    does not count, since names are arbitrary.
    """
    from model.checkpoint.latent_norm import read_latent_norm  # imported here, because it needs numpy

    model_type = str(config.get("model_type")).removesuffix("_gqa")  # suffix of the classes in `model.remote_code`
    if read_latent_norm(config) is not None:
        model_type = "llama"  # mha-to-mla writes another, and no Mistral is known here
    shape = {key: config.get(key) for key in _kept_keys(config)}
    of_shape = tuple(
        original
        for original in ORIGINALS
        if original.shape[0] == model_type
        and dict(zip(SHAPE_KEYS, original.shape[1:], strict=True)).items() >= shape.items()
    )
    last_parts = [name.lower().rsplit("/", 1)[-1] for name in source_names]
    of_name = tuple(o for o in of_shape if any(re.fullmatch(o.pattern, part) for part in last_parts))
    return of_name or of_shape


def _kept_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of SHAPE_KEYS that a model has in common with its original: wrappers add tokens of images."""
    from model.language_model import wrapper_of  # imported here, because it needs numpy

    return tuple(key for key in SHAPE_KEYS if key != "vocab_size" or wrapper_of(config) is None)
