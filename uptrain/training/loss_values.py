"""Losses as text, and their perplexity. Needs no torch."""

import math
import sys

_MAX_LOSS = math.log(sys.float_info.max)
"""Largest loss whose perplexity is a finite float."""


def format_loss(nats: float | None, unit: str = "", error: float | None = None) -> str:
    """Return a loss in nats per token as text, with its standard error if that is known.

    `unit` follows a finite number. None, as in JSON, is not finite. Rounding may make a divergence slightly negative;
    no sign is written before 0.
    """
    return "not finite" if nats is None or not math.isfinite(nats) else f"{nats:z.4f}{_format_error(error)}{unit}"


def format_above_teacher(loss: float | None, teacher_loss: float | None, error: float | None) -> str:
    """Return loss − teacher's loss, in nats per token, as text with its sign, and its standard error if known."""
    difference = None if loss is None or teacher_loss is None else loss - teacher_loss
    if difference is None or not math.isfinite(difference):
        return format_loss(None)
    return f"{difference:+z.4f}{_format_error(error)}"


def _format_error(error: float | None) -> str:
    return "" if error is None or not math.isfinite(error) else f" ± {error:.4f}"


def perplexity(nats: float) -> float:
    """Return the perplexity of a loss in nats per token; infinity if it is beyond float64."""
    return math.exp(nats) if nats < _MAX_LOSS else math.inf
