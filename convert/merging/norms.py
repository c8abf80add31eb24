"""Merge layers that normalise queries and keys (RMS norms, Zhang and Sennrich, arXiv:1910.07467).

A norm is not linear: it divides a token's heads by their root mean square. But it multiplies all dimensions of a head
by one number, and for heads normalised together, all heads of a token by the same number. So linear maps of the heads
after the norm become linear maps of the projections' rows, where each key head counts with its mean scale. The merged
layer normalises its own heads. Its norm weights are the group's, times the number that keeps the mean length.

H query heads, K key/value heads, G groups, D head_dim, F = K·D the keys of a group side by side, X inputs.
"""

from dataclasses import replace

import numpy as np

from convert.layer_tensors.head_matrices import HeadMatrices, NormWeights, Real
from convert.merging.moments import Maps, Moments
from model.families.family import HeadNorms

MIN_WEIGHT = 0.01
"""Minimum weight of a merged layer's norms, as a share of their root mean square: rows are divided by it."""


def normalise(attention: HeadMatrices, norms: HeadNorms | None, key_scales_K: Real | None = None) -> HeadMatrices:
    """Return the attention with its heads as long as norms make them, for inputs of independent numbers.

    `key_scales_K`: the norm's factor of each key head, on a text. Then keys are as long, up to a number that all
    heads share.
    """
    if norms is None:
        return attention
    scales_H, scales_K = (1 / _lengths(heads_HDX, norms.per_head) for heads_HDX in attention.projections)
    if key_scales_K is not None:
        scales_K = key_scales_K
    return replace(
        attention,
        q_HDX=attention.q_HDX * scales_H[:, None, None],
        k_KDX=attention.k_KDX * scales_K[:, None, None],
    )


def _lengths(heads_HDX: Real, per_head: bool) -> Real:
    """Return a norm's divisors of projected heads, for inputs of independent numbers, [H]; 1 for a head of zeros."""
    power_H = np.square(heads_HDX).sum(axis=2).mean(axis=1)
    if not per_head:
        power_H = np.full_like(power_H, power_H.mean())
    return np.asarray(np.sqrt(np.where(power_H > 0, power_H, 1)))


def with_norms(merged: HeadMatrices, norms: NormWeights, moments: list[Moments], maps: list[Maps]) -> HeadMatrices:
    """Return a merged layer with its norms' weights. `norms`: the source's; `moments`, `maps`: one entry a group."""
    old_queries: list[Real] = []
    new_queries: list[Real] = []
    old_keys: list[Real] = []
    new_keys: list[Real] = []
    for group_moments, group_maps in zip(moments, maps, strict=True):
        assert group_moments.raw_keys_FF is not None
        old_queries += [np.diagonal(queries_DD) for queries_DD in group_moments.queries_HDD]
        new_queries += map(_powers, group_maps.queries_HDD, group_moments.queries_HDD)
        old_keys += list(np.diagonal(group_moments.raw_keys_FF).reshape(-1, group_moments.head_dim))
        new_keys.append(_powers(group_maps.keys_DF, group_moments.raw_keys_FF))
    q_HD = _merge_weights(norms.q_HD, np.stack(old_queries), np.stack(new_queries))
    k_GD = _merge_weights(norms.k_KD, np.stack(old_keys), np.stack(new_keys))
    norms = replace(norms, q_HD=q_HD, k_KD=k_GD)
    merged = replace(merged, norms=norms)
    # Projections as long as the source's, so that the norms' epsilon counts as before.
    q_H, k_G = (_lengths(heads_HDX, norms.per_head) for heads_HDX in merged.projections)
    return replace(
        merged,
        q_HDX=merged.q_HDX * (norms.q_length / q_H)[:, None, None],
        k_KDX=merged.k_KDX * (norms.k_length / k_G)[:, None, None],
    )


def _powers(map_DF: Real, moments_FF: Real) -> Real:
    """Return the mean square of each dimension of mapped heads."""
    return np.asarray(np.einsum("df,df->d", map_DF @ moments_FF, map_DF))


def _merge_weights(weights_KD: Real, before_KD: Real, after_GD: Real) -> Real:
    """Return a norm's merged weights, [G, D]. `before`, `after`: mean squares of normalised heads by dimension."""
    weights_GD = weights_KD
    if len(weights_KD) > 1:  # each group's root mean square
        weights_GD = np.sqrt(np.square(weights_KD).reshape(len(after_GD), -1, weights_KD.shape[1]).mean(axis=1))
    smallest = MIN_WEIGHT * np.sqrt(np.square(weights_GD).mean())
    weights_GD = np.maximum(np.abs(weights_GD), smallest or 1.0)
    # Normalised heads have a mean square of about 1, and less where the epsilon counts. That holds before and after.
    old = (before_KD / np.where(weights_KD == 0, 1, np.square(weights_KD))).mean()
    new = (after_GD / np.square(weights_GD)).mean()
    return np.asarray(weights_GD * np.sqrt(new / old)) if old > 0 and new > 0 else weights_GD
