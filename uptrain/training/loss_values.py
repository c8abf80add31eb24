"""Losses as text, and their perplexity. Needs no torch."""

import math
import sys

_MAX_LOSS = math.log(sys.float_info.max)
"""Largest loss whose perplexity is a finite float."""


def format_loss(nats: float | None, unit: str = "") -> str:
    """Return a loss in nats per token as text; `unit` follows a finite number. None, as in JSON, is not finite.

    Rounding may make a divergence slightly negative; no sign is written before 0.
    """
    return "not finite" if nats is None or not math.isfinite(nats) else f"{nats:z.4f}{unit}"


def perplexity(nats: float) -> float:
    """Return the perplexity of a loss in nats per token; infinity if it is beyond float64."""
    return math.exp(nats) if nats < _MAX_LOSS else math.inf
