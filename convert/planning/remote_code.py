"""Find the model code that an output needs where its stock class cannot hold fewer K/V heads than query heads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint import Checkpoint
from model.common.errors import CheckpointError
from model.families import Family
from model.families.family import CustomCode
from model.files.read import MAX_CONFIG_BYTES, read_bytes_up_to


@dataclass(frozen=True)
class Code:
    """Files to copy into the output, and the keys of `config.json` that name them."""

    files: dict[str, Path]
    settings: dict[str, Any]


def find_code(checkpoint: Checkpoint, family: Family) -> Code | None:
    """Return the code that regrouped heads need; None if the stock class or the checkpoint's own code holds them.

    Raises CheckpointError if no code can hold them.
    """
    if family.custom_code is not None:
        return _our_code(checkpoint, family.custom_code)
    if family.own_code_key is not None:
        _check_own_code(checkpoint, family.own_code_key)
    return None


def _our_code(checkpoint: Checkpoint, code: CustomCode) -> Code:
    names = checkpoint.config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if name not in code.architectures:
        raise CheckpointError(
            f"config.json has architectures = {names}; with fewer K/V heads only "
            f"{', '.join(code.architectures)} are supported, because Groupwise has code for them; name one of them."
        )
    config_file, model_file = code.files
    modules = {"AutoConfig": config_file.stem}
    settings = {
        "model_type": code.model_type,
        "architectures": [code.architectures[name]],
        "auto_map": {
            auto: f"{modules.get(auto, model_file.stem)}.{class_name}" for auto, class_name in code.auto_map.items()
        },
        **code.settings,
        **{key: value for key, value in code.defaults.items() if key not in checkpoint.config},
    }
    return Code({file.name: file for file in code.files}, settings)


def _check_own_code(checkpoint: Checkpoint, key: str) -> None:
    """Raise CheckpointError unless the checkpoint's own code mentions a config key. The code is not run."""
    model_type, auto_map = checkpoint.config["model_type"], checkpoint.config.get("auto_map")
    reason = f"transformers' class of {model_type!r} has no number of K/V heads, and the checkpoint"
    if not isinstance(auto_map, dict):
        raise CheckpointError(
            f"{reason} brings no code of its own, so nothing could open it; put the .py files of the original "
            "repository into its folder, and their auto_map into config.json."
        )
    elsewhere = [name for name in auto_map.values() if "--" in str(name)]
    if elsewhere:
        raise CheckpointError(f"{reason}'s own code is elsewhere ({elsewhere[0]}); put those files into its folder.")
    files = {n: c for n, c in checkpoint.side_files.items() if n.endswith(".py") and isinstance(c, Path)}
    if not any(key.encode() in read_bytes_up_to(file, MAX_CONFIG_BYTES) for file in files.values()):
        raise CheckpointError(f"{reason}'s own code ({', '.join(files) or 'no file'}) does not know {key} either.")
