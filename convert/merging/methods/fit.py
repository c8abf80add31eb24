"""Least squares on what attention computes: the best shared keys, and for each head the best queries to read them.

`pca` gives up what a change of coordinates cannot keep. But queries may be mapped in any way: a logit is q · k, and
where the shared key k' moves together with a head's own k, a query can read from k' what it read from k. To second
order the change in what attention computes is the variance of the logits' error under the attention weights, so moments
are taken from the mean key, weighted by attention, at the distances at which queries meet keys. Keys and queries are
solved for in turns, beginning with `pca`; values and outputs are `pca`'s, which are the best already.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from convert.merging.methods import pca
from convert.merging.moments import Maps, Moments, head_selector
from convert.merging.weights import Real

Integers = NDArray[np.int64]

ROUNDS = 8
_RIDGE = 1e-4
"""How strongly, beside the data's own moments, a solution is held to the one before it."""


def merge(moments: Moments) -> Maps:
    """Return how one group's keys are shared and its queries read them."""
    return _alternate(moments, _with_queries(moments, pca.merge(moments)))


def alternatives(moments: Moments, found: Maps, by_weights: Moments) -> tuple[Maps, Maps]:
    """Return other solutions than the one found, which may serve better: logits are not the output, and a text not all.

    They begin with the shared key that `pca` takes by the weights alone, and stay there or go on from it.
    """
    keys_DF, queries_HDD = pca.share_keys(by_weights)
    start = _with_queries(moments, replace(found, keys_DF=keys_DF, queries_HDD=queries_HDD))
    return start, _alternate(moments, start)


def _with_queries(moments: Moments, maps: Maps) -> Maps:
    """Solve for the queries' maps."""
    return replace(maps, queries_HDD=_queries(moments, maps))


def _alternate(moments: Moments, maps: Maps) -> Maps:
    """Solve for keys and queries in turns."""
    for _ in range(ROUNDS):
        maps = replace(maps, keys_DF=_keys(moments, maps))
        maps = _with_queries(moments, maps)
    return maps


def _queries(moments: Moments, maps: Maps) -> Real:
    """Return the best maps of the queries for the shared key."""
    shared_FD = moments.keys_FF @ maps.keys_DF.T
    power_DD = _with_ridge(maps.keys_DF @ shared_FD)
    found = []
    for head, before_DD in enumerate(maps.queries_HDD):
        missing_DF = head_selector(moments, head) - before_DD.T @ maps.keys_DF
        found.append(before_DD + np.linalg.solve(power_DD, (missing_DF @ shared_FD).T))
    return np.stack(found)


def _keys(moments: Moments, maps: Maps) -> Real:
    """Return the best shared key for the queries' maps: a complex number for each key and plane."""
    rows_N2, columns_N2, signs_2N = _basis(moments)
    queried_HDD = maps.queries_HDD @ moments.queries_HDD
    metric_DD = (queried_HDD @ maps.queries_HDD.transpose(0, 2, 1)).sum(axis=0)
    wanted_DF = sum(queried_DD @ head_selector(moments, h) for h, queried_DD in enumerate(queried_HDD))
    slope_DF = (wanted_DF - metric_DD @ maps.keys_DF) @ moments.keys_FF
    slope_N, curvature_NN = np.zeros(len(rows_N2)), np.zeros((len(rows_N2), len(rows_N2)))
    for i in range(2):
        slope_N += signs_2N[i] * slope_DF[rows_N2[:, i], columns_N2[:, i]]
        for j in range(2):
            products_NN = metric_DD[np.ix_(rows_N2[:, i], rows_N2[:, j])]
            products_NN = products_NN * moments.keys_FF[np.ix_(columns_N2[:, i], columns_N2[:, j])]
            curvature_NN += signs_2N[i][:, None] * signs_2N[j] * products_NN
    step_N = np.linalg.solve(_with_ridge(curvature_NN), slope_N)
    keys_DF = maps.keys_DF.copy()
    for i in range(2):
        np.add.at(keys_DF, (rows_N2[:, i], columns_N2[:, i]), signs_2N[i] * step_N)
    return keys_DF


def _basis(moments: Moments) -> tuple[Integers, Integers, Real]:
    """Return the entries of the maps that rotary embeddings commute with: two for each real number, and their signs.

    The first half of the numbers are real parts, of all planes of all keys; the second half imaginary parts.
    """
    n_rotary_pairs, size, n = moments.n_rotary_pairs, moments.head_dim, moments.n_keys
    real = np.tile(np.arange(n_rotary_pairs), n)
    column = real + np.repeat(np.arange(n) * size, n_rotary_pairs)
    rows = np.stack([real, real + n_rotary_pairs], axis=1)
    columns = np.stack([column, column + n_rotary_pairs], axis=1)
    ones = np.ones(len(real))
    return (
        np.concatenate([rows, rows]),
        np.concatenate([columns, columns[:, ::-1]]),
        np.stack([np.concatenate([ones, -ones]), np.concatenate([ones, ones])]),
    )


def _with_ridge(matrix: Real) -> Real:
    pull = _RIDGE * np.trace(matrix) / len(matrix) or 1.0
    held: Real = matrix + pull * np.eye(len(matrix))
    return held
