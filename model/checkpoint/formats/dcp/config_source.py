"""Find the folder with the config.json of a torch.distributed.checkpoint, which itself holds only tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint import hf_folder
from model.checkpoint.formats.dcp.names import FrameworkNames
from model.checkpoint.formats.dcp.olmo_core import is_olmo_core, olmo2_config
from model.checkpoint.tensor import TensorInfo
from model.common.errors import CheckpointError
from model.common.typed_json import json_bytes


@dataclass(frozen=True)
class ConfigSource:
    """The folder of the model's other files, the model's config, and notes for the user."""

    folder: Path
    config_bytes: bytes
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


_FROM_ABOVE = "config.json, and the files beside it, are those of the folder above, since the checkpoint has none."
"""A note for the user. It has no path: it is part of the output's card, which must not depend on where SOURCE lies."""


def find_config_source(path: Path, framework: FrameworkNames | None, tensors: Iterable[TensorInfo]) -> ConfigSource:
    """Return the nearest folder with config.json: the checkpoint's, or its parent.

    OLMo-core's own config.json is read if there is no Hugging Face one. Raises CheckpointError if there is neither.
    """
    places = [path, path.absolute().parent]
    olmo_core = []
    for place in places:
        if (place / "config.json").is_file():
            source = ConfigSource(place, *hf_folder.read_config(place), () if place == path else (_FROM_ABOVE,))
            if not is_olmo_core(source.config):
                return source
            olmo_core.append(source)
    if olmo_core and framework and framework.writes_config:
        folder, run = olmo_core[0].folder, olmo_core[0].config
        config, notes = olmo2_config(folder / "config.json", run, tensors)
        return ConfigSource(folder, json_bytes(config), config, notes)
    kind = f"is {framework.title}'s" if framework else "is a torch.distributed.checkpoint"
    which = f" (Hugging Face's, of model_type {' or '.join(framework.model_types)})" if framework else ""
    raise CheckpointError(
        f"{path} {kind}, which needs the model's config.json{which}; it is neither there nor in {places[1]}: copy it, "
        "with the tokenizer's files, into the checkpoint's folder."
    )
