"""Scale merged heads so that the model's clip (`clip_qkv` of OLMo and MPT) clips as little of them as possible.

The class clips queries, keys and values before rotation. A merge may give shared keys, and the queries of them, other
scales than the source's. Factors that cancel change nothing else: of a value and of the output projection's columns,
or of a key and its queries. Both dimensions of a RoPE pair need the same factor. All factors are powers of 2, so that
they do not round.

H query heads, K key/value heads, G groups, D head_dim, P RoPE pairs.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.layer_tensors.head_matrices import HeadMatrices, Real, reduce_pairs
from model.checkpoint import Checkpoint
from model.families import find_family


def find_clip(checkpoint: Checkpoint) -> Any:
    """Return the `clip_qkv` of a checkpoint's config; None for none."""
    config = find_family(checkpoint.config).config
    if config.get("clip_qkv") is not None:
        return config["clip_qkv"]
    of_mpt = config.get("attn_config")
    return (of_mpt.get("clip_qkv") or None) if isinstance(of_mpt, dict) else None  # 0 is none in MPT's class


@dataclass(frozen=True)
class HeadMaxima:
    """The largest absolute values of a layer's heads on a text, by dimension, in the order of HeadMatrices."""

    q_HD: Real
    k_KD: Real
    v_KD: Real


def scale_into_clip(attention: HeadMatrices, merged: HeadMaxima, source: HeadMaxima, clip: float) -> HeadMatrices:
    """Return a merged layer with heads no larger than the source's, and than the clip, as far as possible.

    Values always allow that. Where a key or its queries are too large, their factor makes both the same share of their
    limits.
    """
    n_groups, heads_per_group = len(attention.k_KDX), attention.heads_per_group
    limits = (_group_maxima(each_HD, n_groups).max(axis=1) for each_HD in (source.q_HD, source.k_KD, source.v_KD))
    q_limit_G1, k_limit_G1, v_limit_G1 = (np.minimum(limit_G, clip)[:, None] for limit_G in limits)
    q_GD, k_GD = (
        _group_maxima(reduce_pairs(np.max, each_HD, attention.n_rotary_pairs), n_groups)
        for each_HD in (merged.q_HD, merged.k_KD)
    )
    too_large_GD = ((q_GD > q_limit_G1) | (k_GD > k_limit_G1)) & (q_GD > 0) & (k_GD > 0)
    shares_GD = np.divide(q_GD * k_limit_G1, k_GD * q_limit_G1, out=np.ones_like(q_GD), where=too_large_GD)
    keys_GD = np.exp2(np.rint(np.log2(shares_GD) / 2))
    queries_HD = np.repeat(1 / keys_GD, heads_per_group, axis=0)
    v_G1 = merged.v_KD.max(axis=1, keepdims=True)
    values_G1 = np.exp2(np.floor(np.log2(np.divide(v_limit_G1, v_G1, out=np.ones_like(v_G1), where=v_G1 > v_limit_G1))))
    norms = attention.norms
    if norms is not None:  # of each dimension of each head, before rotation: then the factors are theirs
        assert len(norms.q_HD) == len(queries_HD), "no class has a clip and norms that heads share"
        norms = replace(norms, q_HD=norms.q_HD * queries_HD, k_KD=norms.k_KD * keys_GD)
    return replace(
        attention,
        q_HDX=attention.q_HDX * queries_HD[:, :, None],
        k_KDX=attention.k_KDX * keys_GD[:, :, None],
        v_KDX=attention.v_KDX * values_G1[:, :, None],
        o_HMD=attention.o_HMD / np.repeat(values_G1, heads_per_group, axis=0)[:, :, None],
        norms=norms,
    )


def _group_maxima(maxima_HD: Real, n_groups: int) -> Real:
    """Return the maxima over each group's heads, [G, D]."""
    return np.asarray(maxima_HD.reshape(n_groups, -1, maxima_HD.shape[1]).max(axis=1))
