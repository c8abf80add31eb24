"""Choose the default lengths of windows and sizes of micro-batches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.checkpoint.context import KEYS, read_context
from model.common import checks
from model.common.errors import InputError
from model.families import FAMILIES
from model.language_model import read_language_config
from uptrain.data.token_cache import CacheManifest

MICRO_BATCH_TOKENS = 8192
"""Default size of a micro-batch, in tokens."""
MAX_DEFAULT_SEQ_LEN = 4096
"""Models with a context of 100 000 tokens were pre-trained on shorter windows for most of their steps."""


def choose_seq_len(requested: int | None, cache: Path | None, model: Path) -> int:
    """Return the length of windows: that of the token cache, else the requested one, else the model's default.

    Raises InputError if another length than the cache's is requested.
    """
    if cache is None:
        return requested or default_seq_len(read_language_config(model))
    of_cache = CacheManifest.parse(cache).seq_len
    if requested not in (None, of_cache):
        raise InputError(f"{cache} has windows of {of_cache} tokens, not {requested}; leave --seq-len out.")
    return of_cache


def default_seq_len(config: Mapping[str, Any]) -> int:
    """Return the default length of windows: the model's context, at most 4096.

    Of a class that is none of Groupwise's families, windows are no longer than what its layers see (`sliding_window`):
    packed documents could not be separated otherwise (`TransformersModel.check_packing`).
    """
    context = _context(config)
    if context is None:
        raise InputError("config.json does not say the model's context; give --seq-len.")
    sees = None if str(config.get("model_type")) in FAMILIES else _sliding_window(config)
    return min(context, MAX_DEFAULT_SEQ_LEN, sees or context)


def _context(config: Mapping[str, Any]) -> int | None:
    """Return the model's context; where config.json leaves it out, as Gemma 3's, the one that its class assumes."""
    given, model_type = read_context(config), str(config.get("model_type"))
    if given is not None:
        return given
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    assumed = getattr(CONFIG_MAPPING[model_type](), KEYS.get(model_type, "max_position_embeddings"), None)
    return assumed if isinstance(assumed, int) else None


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens layers with a sliding window see, by config.json alone; None if no layer has one."""
    width, kinds = config.get("sliding_window"), config.get("layer_types")
    slides = config.get("use_sliding_window", True) and (not isinstance(kinds, list) or "sliding_attention" in kinds)
    if width is None or not slides:
        return None
    return checks.whole_number(width, "config.json has sliding_window", least=2)


def context_warning(config: Mapping[str, Any], seq_len: int) -> str | None:
    """Return a warning if windows are longer than the model's context."""
    context = _context(config)
    if context is None or seq_len <= context:
        return None
    source = "config.json" if read_context(config) is not None else "its class's default"
    return (
        f"windows of {seq_len:,} tokens are longer than the model's context of {context:,} ({source}): it has not "
        "learned positions beyond that."
    )


def default_micro_batch(seq_len: int, n_windows: int | None = None) -> int:
    """Return the default number of windows in a micro-batch, at most the `n_windows` that a process has in a step."""
    size = max(1, MICRO_BATCH_TOKENS // seq_len)
    return size if n_windows is None else min(size, max(1, n_windows))
