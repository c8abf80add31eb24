"""Compute a run's metrics as curves over tokens: smoothed, and reduced to the points that a figure can show."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uptrain.report.history import History

Floats = NDArray[np.float64]
_MAX_POINTS = 1200
_SMOOTHING_SHARE = 50
"""The smoothing window is the number of steps divided by this."""


@dataclass(frozen=True)
class Curve:
    """Curve of a metric. `x` is in tokens; `y` is NaN for numbers that were not finite, which leave a gap."""

    x: Floats
    y: Floats


def measured(history: History, key: str) -> Curve:
    """Return a metric of all steps."""
    return _curve(history.steps, key)


def evaluated(history: History, key: str) -> Curve:
    """Return a metric of the evaluations that have it."""
    return _curve((e for e in history.evaluations if key in e), key)


def _curve(records: Iterable[dict[str, Any]], key: str) -> Curve:
    rows = np.array([(r["tokens"], r[key]) for r in records], dtype=np.float64).reshape(-1, 2)
    return Curve(rows[:, 0], rows[:, 1])


def tokens_at(history: History, steps: list[int]) -> Floats:
    """Return the number of training tokens after each of the steps, interpolated between logged steps."""
    logged = [0, *(r["step"] for r in history.steps)]
    return np.asarray(np.interp(steps, logged, [0, *(r["tokens"] for r in history.steps)]))


def window(curve: Curve) -> int:
    """Return the size of the smoothing window in steps: an odd number, 1 for short runs."""
    return len(curve.y) // _SMOOTHING_SHARE // 2 * 2 + 1


def moving_mean(curve: Curve) -> Curve:
    """Return the centred moving mean over `window` steps, fewer at the ends; NaN is ignored."""
    n, finite = window(curve), np.isfinite(curve.y)
    middle = np.arange(len(finite))
    first, end = np.maximum(middle - n // 2, 0), np.minimum(middle + n // 2 + 1, len(finite))
    sums, counts = (np.concatenate([[0], np.cumsum(v)]) for v in (np.where(finite, curve.y, 0), finite))
    n_finite = counts[end] - counts[first]
    return Curve(curve.x, np.where(n_finite, (sums[end] - sums[first]) / np.maximum(n_finite, 1), np.nan))


def thin(curve: Curve) -> Curve:
    """Keep the lowest and highest point of each interval: the figure looks the same with fewer points."""
    if len(curve.y) <= _MAX_POINTS:
        return curve
    indices: set[int] = {0, len(curve.y) - 1}
    for interval in np.array_split(np.arange(len(curve.y)), _MAX_POINTS // 2):
        y = curve.y[interval]
        if np.isfinite(y).any():
            indices |= {int(interval[np.nanargmin(y)]), int(interval[np.nanargmax(y)])}
        else:
            indices.add(int(interval[0]))  # a gap stays one
    order = np.array(sorted(indices))
    return Curve(curve.x[order], curve.y[order])
