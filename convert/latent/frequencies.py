"""Choose the frequencies of the shared rotated key, and write them to `config.json`.

A *pair* is two dimensions of the source's heads that RoPE rotates together; pair p rotates with frequency f_p. A
*channel* is two dimensions of the shared key. The *pair index* of a channel gives its frequency in units of pairs, and
may lie between two of them: 1.5 is the geometric mean of pairs 1 and 2.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPACING_SHARES = (0.5, 0.625, 0.75, 1.0)
"""Shares of all pairs, from the fastest on, over which equally spaced channels are tried."""
_MAX_DISTANCE = 1024
"""Tokens within which most attention stays."""


@dataclass(frozen=True)
class SourceRope:
    """The rotary embedding of the source."""

    frequencies: tuple[float, ...]
    """Of each pair, in radians per token."""
    attention_scaling: float
    """The factor on cosines and sines (YaRN); logits have it twice."""
    theta: float
    is_plain: bool
    """Whether the frequencies are the powers of θ, without scaling."""
    context: int
    """`max_position_embeddings`."""

    @property
    def n_rotary_pairs(self) -> int:
        return len(self.frequencies)


@dataclass(frozen=True)
class Fold:
    """RoPE pairs of the source's keys that share channels."""

    pairs: tuple[int, ...]
    channels: tuple[int, ...]


def stock_pair_indices(spacing: float, n_channels: int) -> tuple[float, ...]:
    """Return the pair indices 0, c, 2c, …: frequencies that stock classes compute from another base θ' alone."""
    return tuple(spacing * channel for channel in range(n_channels))


def spacings(n_rotary_pairs: int, n_channels: int) -> tuple[float, ...]:
    """Return the spacings to try, from the faster half of all pairs to all of them.

    Slow pairs hardly rotate within the attended distance, so the latent can hold them.
    """
    return tuple(share * n_rotary_pairs / n_channels for share in SPACING_SHARES)


def even_pair_indices(n_rotary_pairs: int, n_channels: int) -> tuple[float, ...]:
    """Return whole pair indices only, spread evenly: with twice as many channels as pairs, each pair twice."""
    return tuple(float(channel * n_rotary_pairs // n_channels) for channel in range(n_channels))


def spacing_of(pair_indices: tuple[float, ...]) -> float | None:
    """Return c if the pair indices are 0, c, 2c, …; else None."""
    if len(pair_indices) == 1:
        return 1.0 if pair_indices == (0.0,) else None
    spacing = pair_indices[1]
    return spacing if spacing > 0 and pair_indices == stock_pair_indices(spacing, len(pair_indices)) else None


def folds(pair_indices: tuple[float, ...], n_rotary_pairs: int) -> list[Fold]:
    """Return which pairs share which channels. Pairs beyond the reach of any channel belong to none.

    With channels at distance c, a pair goes to the nearest channel within c / 2. Otherwise it goes to channels of its
    own frequency only. A channel without a pair joins the nearest one.
    """
    reach = (spacing_of(pair_indices) or 0.0) / 2
    values = sorted(set(pair_indices))
    pairs_by_value: dict[float, set[int]] = defaultdict(set)
    for pair in range(n_rotary_pairs):
        nearest = min(values, key=lambda value: abs(value - pair))
        if abs(nearest - pair) <= reach:
            pairs_by_value[nearest].add(pair)
    joined: dict[tuple[int, ...], list[int]] = defaultdict(list)
    fold_of_pair = {pair: tuple(sorted(pairs)) for pairs in pairs_by_value.values() for pair in pairs}
    for channel, value in enumerate(pair_indices):
        pairs = pairs_by_value.get(value)
        nearest_pair = min(range(n_rotary_pairs), key=lambda pair: abs(value - pair))
        joined[tuple(sorted(pairs)) if pairs else fold_of_pair.get(nearest_pair, (nearest_pair,))].append(channel)
    return [Fold(pairs, tuple(channels)) for pairs, channels in sorted(joined.items())]


def frequencies_at(source_rope: SourceRope, pair_indices: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the frequencies at pair indices, interpolated between pairs on a logarithmic scale."""
    if source_rope.is_plain:
        return np.asarray(source_rope.theta ** (-np.asarray(pair_indices) / source_rope.n_rotary_pairs))
    pairs = np.arange(source_rope.n_rotary_pairs)
    return np.asarray(np.exp(np.interp(pair_indices, pairs, np.log(np.maximum(source_rope.frequencies, 1e-30)))))


def are_stock(source_rope: SourceRope, pair_indices: tuple[float, ...]) -> bool:
    """Return whether stock classes compute the frequencies at pair indices from another base θ' alone."""
    return source_rope.is_plain and spacing_of(pair_indices) is not None


def rope_parameters(source_rope: SourceRope, pair_indices: tuple[float, ...]) -> dict[str, Any]:
    """Return `rope_parameters` of `config.json`: another base θ' if that gives the frequencies, else `longrope`.

    `longrope` divides the frequencies of a base by a list of numbers (transformers,
    `modeling_rope_utils._compute_longrope_parameters`); with one list for short and long texts it can express any.
    transformers before 5.23 reads `factor`. vLLM's own code of DeepSeek-V3 would take this for YaRN, and compute other
    frequencies silently; it stops at a `beta_fast` of null, which transformers ignores after a warning.
    """
    spacing, n_channels, theta = spacing_of(pair_indices), len(pair_indices), source_rope.theta
    if are_stock(source_rope, pair_indices):
        assert spacing is not None
        exponent = spacing * n_channels / source_rope.n_rotary_pairs
        return {"rope_type": "default", "rope_theta": theta if exponent == 1 else theta**exponent}
    own = theta ** (-np.arange(n_channels) / n_channels)
    factors = [float(factor) for factor in own / frequencies_at(source_rope, pair_indices)]
    return {
        "rope_type": "longrope", "rope_theta": theta, "short_factor": factors, "long_factor": factors,
        "factor": 1.0, "attention_factor": 1.0, "beta_fast": None,
        "original_max_position_embeddings": source_rope.context,
    }  # fmt: skip


def coherence(frequencies: tuple[float, ...], context: int) -> NDArray[np.complex128]:
    """Return for each pair the mean of exp(-i f Δ) over distances Δ of less than 1024 tokens, weighted by 1 / (Δ + 1).

    An unrotated key stands for a rotated one best if it is multiplied by this. It is near 1 for pairs that hardly
    rotate within the attended distance, and near 0 for the others.
    """
    distances = np.arange(min(context, _MAX_DISTANCE))
    weights = 1 / (distances + 1)
    phases = np.exp(-1j * np.outer(frequencies, distances))
    return np.asarray(phases @ weights / weights.sum())
