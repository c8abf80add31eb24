"""The folder with config.json that belongs to a torch.distributed.checkpoint, which holds tensors only."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint import hf_folder
from model.checkpoint.formats.dcp.names import Naming
from model.checkpoint.formats.dcp.olmo_core import is_olmo_core, olmo2_config
from model.checkpoint.tensor import Tensor
from model.common.errors import CheckpointError


@dataclass(frozen=True)
class ConfigSource:
    """Where the model's other files are, its config, and what to tell of it."""

    folder: Path
    config_text: bytes
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def find_home(path: Path, naming: Naming | None, tensors: Iterable[Tensor]) -> ConfigSource:
    """Return the nearest folder with config.json: the checkpoint's, the one above, or RUN/model of our own runs.

    OLMo-core's own config.json is read where there is no Hugging Face one. Raises CheckpointError if there is neither.
    """
    above = path.absolute().parents
    places = [path, above[0], *(parent / "model" for parent in above[2:3])]
    own = []
    for place in places:
        if (place / "config.json").is_file():
            home = ConfigSource(place, *hf_folder.read_config(place))
            if not is_olmo_core(home.config):
                return home
            own.append(home)
    if own and naming and naming.writes_config:
        config, notes = olmo2_config(own[0].folder / "config.json", own[0].config, tensors)
        return ConfigSource(own[0].folder, hf_folder.json_text(config), config, notes)
    kind = f"is {naming.title}'s" if naming else "is a torch.distributed.checkpoint"
    which = f" (Hugging Face's, of model_type {' or '.join(naming.model_types)})" if naming else ""
    raise CheckpointError(
        f"{path} {kind}, which needs the model's config.json{which}; it is in none of "
        f"{', '.join(map(str, places))}: copy it, with the tokenizer's files, into the first."
    )
