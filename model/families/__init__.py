"""The supported model families: their attention tensors, and the defaults of their config classes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.common.errors import CheckpointError
from model.families import falcon, gpt_neox, mpt, t5
from model.families.family import Family, Wrapper
from model.families.standard import STANDARD
from model.families.unsupported import unsupported_reason
from model.families.wrappers import WRAPPERS

__all__ = ["FAMILIES", "NATIVE_FAMILIES", "Family", "FamilyMatch", "find_family", "our_code"]

NATIVE_FAMILIES = ("llama", "mistral", "qwen2")
"""The families that `model.decoder` implements (`model.decoder.config.is_native`). transformers' classes run the
others."""

_OWN_LAYOUT = (falcon.FAMILY, gpt_neox.FAMILY, gpt_neox.GQA_FAMILY, mpt.FAMILY, t5.FAMILY, t5.MT5_FAMILY, t5.GQA_FAMILY)
_KNOWN: tuple[Family | Wrapper, ...] = (*STANDARD, *WRAPPERS, *_OWN_LAYOUT)
FAMILIES = {family.model_type: family for family in sorted(_KNOWN, key=lambda family: family.model_type)}
"""All supported families and wrappers, by `model_type`."""


@dataclass(frozen=True)
class FamilyMatch:
    """The family of a checkpoint's language model."""

    model_type: str
    """The `model_type` at the top level of `config.json`."""
    family: Family
    config: Mapping[str, Any]
    """The language model's config."""
    text_config: str | None = None
    """The key of that config inside a wrapper's config; None without a wrapper."""


def find_family(config: Mapping[str, Any]) -> FamilyMatch:
    """Return the family that a `config.json` names. Raises CheckpointError for an unsupported one."""
    model_type = config.get("model_type")
    subject = f"model_type {model_type!r}" if model_type is not None else "config.json without model_type"
    entry = _find_entry(model_type, subject, "auto_map" in config)
    if isinstance(entry, Family):
        return FamilyMatch(entry.model_type, entry, config)
    text = config.get(entry.text_config)
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json has {entry.text_config} = {text!r}, where transformers' {subject} has its language model's "
            "config; get the version of the model made for transformers."
        )
    inner_type = text.get("model_type", entry.default_text_type)
    if isinstance(inner_type, str) and inner_type in entry.text_types:
        inner_type = entry.text_types[inner_type]
        rope = text.get("rope_parameters")
        given = {**text, **(rope if isinstance(rope, dict) else {})}
        missing = {key: value for key, value in entry.text_defaults.items() if given.get(key) is None}
        text = {**text, **missing, "model_type": inner_type}
    family = _find_entry(inner_type, f"{subject} around model_type {inner_type!r}", "auto_map" in config)
    if not isinstance(family, Family):
        raise CheckpointError(f"{subject} around model_type {inner_type!r}, itself a wrapper, is not supported.")
    names = replace(family.names, prefix=entry.prefix, other_towers=entry.other_towers)
    return FamilyMatch(entry.model_type, replace(family, names=names), text, entry.text_config)


def our_code(config: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of `model/remote_code` that a merged model runs, by name; none if its class is another's.

    They replace the copies that come with such a model: an earlier version may have written those.
    """
    entry = FAMILIES.get(str(config.get("model_type")))
    if not isinstance(entry, Family) or entry.custom_code is None or entry.custom_code.model_type != entry.model_type:
        return {}
    return {file.name: file for file in entry.custom_code.files}


def _find_entry(model_type: object, subject: str, has_code: bool) -> Family | Wrapper:
    """Return the entry of a model type. Raises CheckpointError, which begins with `subject`, if there is none.

    `has_code`: whether config.json names code of the checkpoint.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    refusal = unsupported_reason(model_type)
    if refusal is not None:
        raise CheckpointError(f"{subject} cannot be converted: {refusal}")
    code = (
        ": it runs its own code (auto_map), which may ignore the number of K/V heads. Get a version of the model that "
        "transformers opens without code, of a supported type"
        if has_code
        else ""
    )
    raise CheckpointError(f"{subject} is not supported{code}; supported are: {', '.join(FAMILIES)}.")
