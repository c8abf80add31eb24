"""Which key/value heads share a group: neighbours, or those that are most alike once they are aligned.

Heads may change places together with the queries that read them and their columns of the output projection: the layer
computes the same, and the groups are neighbours again.
"""

from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from convert.merging.moments import Moments, key_planes
from convert.merging.weights import LayerAttention, Real

EXACT_UP_TO = 16
"""Heads for which all partitions are looked at; beyond, pairs are swapped as long as that helps."""


def reorder(attention: LayerAttention, order: list[int]) -> LayerAttention:
    """Return the same attention with its key/value heads, and all that belongs to them, in this order."""
    times = attention.heads_per_group
    queries = [key * times + i for key in order for i in range(times)]
    return replace(
        attention,
        q_HDX=attention.q_HDX[queries],
        k_KDX=attention.k_KDX[order],
        v_KDX=attention.v_KDX[order],
        o_HMD=attention.o_HMD[queries],
    )


def similar_order(whole: Moments, n_groups: int) -> list[int]:
    """Return the order in which heads that are most alike become neighbours. `whole` are a whole layer's moments."""
    alike_KK = similarity(whole)
    size = len(alike_KK) // n_groups
    if size in (1, len(alike_KK)):
        return list(range(len(alike_KK)))
    groups = _best(alike_KK, size) if len(alike_KK) <= EXACT_UP_TO else _swapped(alike_KK, size)
    return [head for group in sorted(groups) for head in group]


def similarity(whole: Moments) -> Real:
    """Return how alike each two heads can be made: cosines of keys and of values in the mean, [K, K]."""
    keys_KK, values_KK = similarities(whole)
    return (keys_KK + values_KK) / 2


def similarities(whole: Moments) -> tuple[Real, Real]:
    """Return the cosines of each two key heads and of each two value heads after alignment, [K, K] each.

    Two keys are turned plane by plane, two value heads by a rotation (Jin et al., arXiv:2412.20677, section 3).
    """
    n, size = whole.n_keys, whole.head_dim
    planes_PKK = key_planes(whole)
    keys_KDKD = whole.keys_FF.reshape(n, size, n, size)
    still = slice(2 * whole.n_rotary_pairs, size)
    keys_KK = np.abs(planes_PKK).sum(axis=0) + _nuclear(keys_KDKD[:, still, :, still])
    values_KK = _nuclear(whole.values_FF.reshape(n, size, n, size))
    return _cosines(keys_KK), _cosines(values_KK)


def _nuclear(heads_KDKD: Real) -> Real:
    """Return the largest trace that rotations can give each two heads' product: the sum of its singular values."""
    if heads_KDKD.shape[1] == 0:
        return np.zeros((len(heads_KDKD), len(heads_KDKD)))
    sums: Real = np.linalg.svd(heads_KDKD.transpose(0, 2, 1, 3), compute_uv=False).sum(axis=-1)
    return sums


def _cosines(products_KK: Real) -> Real:
    lengths_K = np.sqrt(np.diagonal(products_KK))
    cosines: Real = products_KK / np.maximum(np.outer(lengths_K, lengths_K), 1e-300)
    return cosines


def _best(alike_KK: Real, size: int) -> list[tuple[int, ...]]:
    """Return the partition into groups of `size` whose members are most alike in sum, of all there are."""

    @cache
    def best(left: frozenset[int]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if not left:
            return 0.0, ()
        first, *others = sorted(left)
        found = []
        for rest in combinations(others, size - 1):
            group = (first, *rest)
            score, groups = best(left - set(group))
            found.append((score + float(alike_KK[np.ix_(group, group)].sum()), (group, *groups)))
        return max(found, key=lambda pair: pair[0])

    return list(best(frozenset(range(len(alike_KK))))[1])


def _swapped(alike_KK: Real, size: int) -> list[tuple[int, ...]]:
    """Return neighbours as groups, after every swap of two heads that makes groups more alike."""
    n = len(alike_KK)
    group_K = np.arange(n) // size
    while True:
        # What head k would add to each group, and so what swapping i and j would bring.
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
