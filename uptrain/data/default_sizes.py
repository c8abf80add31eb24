"""Choose the default lengths of windows and sizes of micro-batches."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from model.common import checks
from model.common.errors import InputError

MICRO_BATCH_TOKENS = 8192
"""Default size of a micro-batch, in tokens."""
MAX_DEFAULT_SEQ_LEN = 4096
"""Models with a context of 100 000 tokens were pre-trained on shorter windows for most of their steps."""
CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len")
"""Names of the model's context in config.json. The second is MPT's."""


def default_seq_len(config: Mapping[str, Any]) -> int:
    """Return the default length of windows: the model's context, at most 4096."""
    text_config = config.get("text_config")  # of a model that also reads images
    places = (config, text_config) if isinstance(text_config, Mapping) else (config,)
    for place, key in product(places, CONTEXT_KEYS):
        if place.get(key) is not None:
            return min(checks.whole_number(place[key], f"config.json has {key}", least=2), MAX_DEFAULT_SEQ_LEN)
    raise InputError("config.json does not say the model's context; give --seq-len.")


def default_micro_batch(seq_len: int) -> int:
    """Return the default number of windows in a micro-batch."""
    return max(1, MICRO_BATCH_TOKENS // seq_len)
