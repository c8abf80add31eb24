"""The model families we know, one file each, imported when used."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from model.common.errors import CheckpointError
from model.families.family import Family, Wrapper
from model.families.unsupported import reason

__all__ = ["FAMILIES", "Family", "Found", "find_family", "load_family"]

# One module each in this folder, named as its `model_type`.
FAMILIES = (
    "apertus", "arcee", "aya_vision", "cohere", "cohere2", "dots1", "ernie4_5", "exaone4", "falcon", "flex_olmo",
    "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "gpt_neox", "gpt_neox_gqa", "gpt_oss", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "idefics2", "idefics3", "jais2", "llama", "llava", "llava_next",
    "llava_next_video", "llava_onevision", "ministral3", "mistral", "mistral3", "mixtral", "mpt", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "paligemma", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "smolvlm", "stablelm", "starcoder2", "t5", "t5_gqa", "video_llava",
    "vipllava",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The family of a checkpoint's language model."""

    model_type: str
    """As `config.json` says, on its top level."""
    family: Family
    config: Mapping[str, Any]
    """The language model's config."""
    text_config: str | None = None
    """The key under which it stands, where the language model is wrapped."""


def find_family(config: Mapping[str, Any]) -> Found:
    """Return the family that a `config.json` names. Raises CheckpointError for one we do not know."""
    model_type = config.get("model_type")
    given = f"model_type {model_type!r}" if model_type is not None else "config.json without model_type"
    entry = _load(model_type, given)
    if isinstance(entry, Family):
        return Found(entry.model_type, entry, config)
    text = config.get(entry.text_config)
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json has {entry.text_config} = {text!r}, where transformers' {given} has its language model's "
            "config; get the version of the model made for transformers."
        )
    inner_type = text.get("model_type", entry.absent_text_type)
    family = _load(inner_type, f"{given} around model_type {inner_type!r}")
    if not isinstance(family, Family):
        raise CheckpointError(f"{given} around model_type {inner_type!r}, itself a wrapper, is not supported.")
    family = replace(family, prefix=entry.prefix, others=entry.others)
    return Found(entry.model_type, family, text, entry.text_config)


def load_family(name: str) -> Family | Wrapper:
    """Return what we know of one of FAMILIES."""
    entry: Family | Wrapper = import_module(f"model.families.{name}").FAMILY
    return entry


def _load(model_type: object, given: str) -> Family | Wrapper:
    if model_type in FAMILIES:
        return load_family(str(model_type))
    why = reason(model_type)
    if why is not None:
        raise CheckpointError(f"{given} cannot be converted: {why}")
    raise CheckpointError(f"{given} is not supported; supported are: {', '.join(FAMILIES)}.")
