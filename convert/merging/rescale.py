"""Rescale merged heads: averaging shrinks them, because it cancels the components in which a group's heads differ.

The model's loss depends more on the variance of the logits than on their squared error: attention that is too uniform
costs more than attention that is slightly wrong. So a plain least-squares merge is not the best start.
"""

from dataclasses import replace

import numpy as np

from convert.merging.moments import Maps, Moments
from convert.merging.weights import Real


def renorm(moments: Moments, maps: Maps, mode: str) -> Maps:
    """Return the maps, rescaled by `mode`, one of RENORMS.

    `norm`: scale shared keys and values to the mean norm of their group. `spread`: scale queries to keep the logit
    variance of each query head. `none`: keep the method's scale.
    """
    if mode == "norm":
        return replace(
            maps,
            keys_DF=maps.keys_DF * _to_mean_length(moments, moments.keys_FF, maps.keys_DF),
            values_DF=maps.values_DF * _to_mean_length(moments, moments.values_FF, maps.values_DF),
        )
    if mode == "spread":
        return replace(maps, queries_HDD=maps.queries_HDD * _to_old_spread(moments, maps)[:, None, None])
    return maps


def _to_mean_length(moments: Moments, heads_FF: Real, map_DF: Real) -> float:
    length = np.sqrt(max(float(np.einsum("df,fg,dg->", map_DF, heads_FF, map_DF, optimize=True)), 0.0))
    lengths_K = np.sqrt(np.diagonal(heads_FF).reshape(moments.n_keys, -1).sum(axis=1))
    return float(lengths_K.mean() / length) if length > 0 else 1.0


def _to_old_spread(moments: Moments, maps: Maps) -> Real:
    shared_DD = maps.keys_DF @ moments.keys_FF @ maps.keys_DF.T
    scales = []
    for head, (queries_DD, map_DD) in enumerate(zip(moments.queries_HDD, maps.queries_HDD, strict=True)):
        own_DD = moments.keys_FF[moments.key_of(head), moments.key_of(head)]
        before = float(np.einsum("de,de->", queries_DD, own_DD))
        after = float(np.einsum("de,de->", map_DD @ queries_DD @ map_DD.T, shared_DD))
        scales.append(np.sqrt(before / after) if before > 0 < after else 1.0)
    return np.array(scales)
