"""The model families we know, one file each, imported when used."""

from importlib import import_module

from model.errors import CheckpointError
from model.families.family import Family

__all__ = ["FAMILIES", "Family", "find_family"]

# One module each in this folder, named as its `model_type`.
FAMILIES = ("llama", "mistral", "qwen2")


def find_family(model_type: object) -> Family:
    """Return the family of a config's `model_type`. Raises CheckpointError for one we do not know."""
    if model_type not in FAMILIES:
        given = f"model_type {model_type!r}" if model_type is not None else "config.json without model_type"
        raise CheckpointError(f"{given} is not supported; supported are: {', '.join(FAMILIES)}.")
    family: Family = import_module(f"model.families.{model_type}").FAMILY
    return family
