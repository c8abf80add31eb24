"""The model families we know: their attention tensors, and the defaults of their config classes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.common.errors import CheckpointError
from model.families import falcon, gpt_neox, mpt, t5
from model.families.family import Family, Wrapper
from model.families.standard import STANDARD
from model.families.unsupported import reason
from model.families.wrappers import WRAPPERS

__all__ = ["FAMILIES", "Family", "FamilyMatch", "find_family"]

_OWN_LAYOUT = (falcon.FAMILY, gpt_neox.FAMILY, gpt_neox.GQA_FAMILY, mpt.FAMILY, t5.FAMILY, t5.GQA_FAMILY)
_KNOWN: tuple[Family | Wrapper, ...] = (*STANDARD, *WRAPPERS, *_OWN_LAYOUT)
FAMILIES = {family.model_type: family for family in sorted(_KNOWN, key=lambda family: family.model_type)}
"""All that we know, by `model_type`."""


@dataclass(frozen=True)
class FamilyMatch:
    """The family of a checkpoint's language model."""

    model_type: str
    """As `config.json` says, on its top level."""
    family: Family
    config: Mapping[str, Any]
    """The language model's config."""
    text_config: str | None = None
    """The key under which it stands, where the language model is wrapped."""


def find_family(config: Mapping[str, Any]) -> FamilyMatch:
    """Return the family that a `config.json` names. Raises CheckpointError for one we do not know."""
    model_type = config.get("model_type")
    given = f"model_type {model_type!r}" if model_type is not None else "config.json without model_type"
    entry = _load(model_type, given)
    if isinstance(entry, Family):
        return FamilyMatch(entry.model_type, entry, config)
    text = config.get(entry.text_config)
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json has {entry.text_config} = {text!r}, where transformers' {given} has its language model's "
            "config; get the version of the model made for transformers."
        )
    inner_type = text.get("model_type", entry.default_text_type)
    family = _load(inner_type, f"{given} around model_type {inner_type!r}")
    if not isinstance(family, Family):
        raise CheckpointError(f"{given} around model_type {inner_type!r}, itself a wrapper, is not supported.")
    family = replace(family, prefix=entry.prefix, other_towers=entry.other_towers)
    return FamilyMatch(entry.model_type, family, text, entry.text_config)


def _load(model_type: object, given: str) -> Family | Wrapper:
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    why = reason(model_type)
    if why is not None:
        raise CheckpointError(f"{given} cannot be converted: {why}")
    raise CheckpointError(f"{given} is not supported; supported are: {', '.join(FAMILIES)}.")
