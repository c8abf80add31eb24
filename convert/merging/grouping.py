"""Choose which key/value heads share a group: neighbours, or the most similar heads after alignment.

Reordering heads together with their queries and their columns of the output projection leaves the layer's output
unchanged. So the heads of a group can always become neighbours.
"""

from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from convert.merging.moments import Moments, key_planes
from convert.merging.weights import LayerAttention, NormWeights, Real

EXACT_UP_TO = 16
"""Number of heads up to which all partitions are compared; with more, pairs are swapped while the score rises."""


def reorder(attention: LayerAttention, order: list[int]) -> LayerAttention:
    """Return the attention with its key/value heads, their queries and their output columns in this order."""
    n = attention.heads_per_group
    queries = [key * n + i for key in order for i in range(n)]
    return replace(
        attention,
        q_HDX=attention.q_HDX[queries],
        k_KDX=attention.k_KDX[order],
        v_KDX=attention.v_KDX[order],
        o_HMD=attention.o_HMD[queries],
        norms=attention.norms and _reordered(attention.norms, queries, order),
    )


def _reordered(norms: NormWeights, queries: list[int], order: list[int]) -> NormWeights:
    if norms.per_head:
        return norms
    return replace(norms, q_HD=norms.q_HD[queries], k_KD=norms.k_KD[order])


def similar_order(whole: Moments, n_groups: int) -> list[int]:
    """Return the order that makes the most similar heads neighbours. `whole`: the moments of a whole layer."""
    alike_KK = similarity(whole)
    size = len(alike_KK) // n_groups
    if size in (1, len(alike_KK)):
        return list(range(len(alike_KK)))
    groups = _best(alike_KK, size) if len(alike_KK) <= EXACT_UP_TO else _swapped(alike_KK, size)
    return [head for group in sorted(groups) for head in group]


def similarity(whole: Moments) -> Real:
    """Return the mean of the aligned cosines of keys and of values for each pair of heads, [K, K]."""
    keys_KK, values_KK = similarities(whole)
    return (keys_KK + values_KK) / 2


def similarities(whole: Moments) -> tuple[Real, Real]:
    """Return the cosines of each pair of key heads and of value heads after alignment, [K, K] each.

    Keys are aligned by a rotation of each plane, values by one rotation (Jin et al., arXiv:2412.20677, section 3).
    """
    n, size = whole.n_keys, whole.head_dim
    planes_PKK = key_planes(whole)
    keys_KDKD = whole.keys_FF.reshape(n, size, n, size)
    unrotated = slice(2 * whole.n_rotary_pairs, size)
    keys_KK = np.abs(planes_PKK).sum(axis=0) + _nuclear(keys_KDKD[:, unrotated, :, unrotated])
    values_KK = _nuclear(whole.values_FF.reshape(n, size, n, size))
    return _cosines(keys_KK), _cosines(values_KK)


def _nuclear(heads_KDKD: Real) -> Real:
    """Return the maximum trace of each two heads' product under rotation: the sum of its singular values, [K, K]."""
    if heads_KDKD.shape[1] == 0:
        return np.zeros((len(heads_KDKD), len(heads_KDKD)))
    sums: Real = np.linalg.svd(heads_KDKD.transpose(0, 2, 1, 3), compute_uv=False).sum(axis=-1)
    return sums


def _cosines(products_KK: Real) -> Real:
    lengths_K = np.sqrt(np.diagonal(products_KK))
    cosines: Real = products_KK / np.maximum(np.outer(lengths_K, lengths_K), 1e-300)
    return cosines


def _best(alike_KK: Real, size: int) -> list[tuple[int, ...]]:
    """Return the partition into groups of `size` with the largest sum of similarities, by trying all."""

    @cache
    def best(left: frozenset[int]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if not left:
            return 0.0, ()
        first, *remaining = sorted(left)
        partitions = []
        for rest in combinations(remaining, size - 1):
            group = (first, *rest)
            score, groups = best(left - set(group))
            partitions.append((score + float(alike_KK[np.ix_(group, group)].sum()), (group, *groups)))
        return max(partitions, key=lambda pair: pair[0])

    return list(best(frozenset(range(len(alike_KK))))[1])


def _swapped(alike_KK: Real, size: int) -> list[tuple[int, ...]]:
    """Start from groups of neighbours, and swap the best pair of heads until no swap raises the similarity."""
    n = len(alike_KK)
    group_K = np.arange(n) // size
    while True:
        # to_KG: similarity of head k to each group without k. gain_KK: rise of the score when i and j are swapped.
        member_KG = np.eye(n // size)[group_K]
        to_KG = alike_KK @ member_KG - np.diagonal(alike_KK)[:, None] * member_KG
        own_K = to_KG[np.arange(n), group_K]
        to_KK = to_KG[:, group_K]
        gain_KK = to_KK + to_KK.T - own_K[:, None] - own_K - 2 * alike_KK
        gain_KK[group_K[:, None] == group_K] = 0
        i, j = np.unravel_index(gain_KK.argmax(), gain_KK.shape)
        if gain_KK[i, j] <= 1e-12:
            return [tuple(int(k) for k in np.flatnonzero(group_K == g)) for g in range(n // size)]
        group_K[i], group_K[j] = group_K[j], group_K[i]
