"""Read the longest context of a model from its `config.json`."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from model.common import checks

KEYS = ("max_position_embeddings", "max_seq_len")
"""Names of the context in the config classes of transformers. The second is MPT's."""


def read_context(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest context, of a wrapper its language model's; None if the config has none.

    Raises CheckpointError if it is not a whole number of at least 2.
    """
    text_config = config.get("text_config")
    places = (config, text_config) if isinstance(text_config, Mapping) else (config,)
    for place, key in product(places, KEYS):
        if place.get(key) is not None:
            return checks.whole_number(place[key], f"config.json has {key}", least=2)
    return None
