"""Numbers of a run as curves over tokens: smoothed, and thinned to what a picture can show."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uptrain.report.history import History

Floats = NDArray[np.float64]
_MAX_POINTS = 1200
_SMOOTHING_SHARE = 50
"""A smoothed value covers this part of a run's steps."""


@dataclass(frozen=True)
class Curve:
    """`x` in tokens; `y` is NaN where a number was not finite, which leaves a gap in a line."""

    x: Floats
    y: Floats


def measured(history: History, key: str) -> Curve:
    """Return a number of all steps."""
    return _curve(history.steps, key)


def evaluated(history: History, key: str) -> Curve:
    """Return a number of those evaluations that measured it."""
    return _curve((e for e in history.evaluations if key in e), key)


def _curve(records: Iterable[dict[str, Any]], key: str) -> Curve:
    rows = np.array([(r["tokens"], r[key]) for r in records], dtype=np.float64).reshape(-1, 2)
    return Curve(rows[:, 0], rows[:, 1])


def tokens_at(history: History, steps: list[int]) -> Floats:
    """Return how many tokens had been trained on after each of the steps."""
    known = [0, *(r["step"] for r in history.steps)]
    return np.asarray(np.interp(steps, known, [0, *(r["tokens"] for r in history.steps)]))


def window(curve: Curve) -> int:
    """Return over how many steps to smooth: an odd number, 1 for a short run."""
    return len(curve.y) // _SMOOTHING_SHARE // 2 * 2 + 1


def moving_mean(curve: Curve) -> Curve:
    """Return the mean of the `window` steps around each, fewer at the ends; NaN does not count."""
    n, known = window(curve), np.isfinite(curve.y)
    middle = np.arange(len(known))
    first, end = np.maximum(middle - n // 2, 0), np.minimum(middle + n // 2 + 1, len(known))
    sums, counts = (np.concatenate([[0], np.cumsum(v)]) for v in (np.where(known, curve.y, 0), known))
    n_known = counts[end] - counts[first]
    return Curve(curve.x, np.where(n_known, (sums[end] - sums[first]) / np.maximum(n_known, 1), np.nan))


def thin(curve: Curve) -> Curve:
    """Keep the lowest and the highest point of each stretch, so that a picture looks the same with fewer points."""
    if len(curve.y) <= _MAX_POINTS:
        return curve
    kept: set[int] = {0, len(curve.y) - 1}
    for stretch in np.array_split(np.arange(len(curve.y)), _MAX_POINTS // 2):
        y = curve.y[stretch]
        if np.isfinite(y).any():
            kept |= {int(stretch[np.nanargmin(y)]), int(stretch[np.nanargmax(y)])}
    order = np.array(sorted(kept))
    return Curve(curve.x[order], curve.y[order])
