"""Read the longest context of a model from its `config.json`."""

from collections.abc import Mapping
from typing import Any

from model.common import checks

KEYS = {"mpt": "max_seq_len", **dict.fromkeys(("gpt2", "gptj", "codegen", "gpt_bigcode"), "n_positions")}
"""Names of the context where it is not `max_position_embeddings`, by `model_type`."""


def read_context(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest context, of a wrapper its language model's; None if the config has none.

    Raises CheckpointError if it is not a whole number of at least 2.
    """
    text_config = config.get("text_config")
    places = (config, text_config) if isinstance(text_config, Mapping) else (config,)
    for place in places:
        key = KEYS.get(str(place.get("model_type")), "max_position_embeddings")
        if place.get(key) is not None:
            return checks.whole_number(place[key], f"config.json has {key}", least=2)
    return None
