"""The closed form: least squares on the attention logits, for the shared keys and for each head's map of its queries.

`pca` only changes coordinates, and so drops every other component. But queries allow any linear map: a logit is q · k,
and where the shared key k' correlates with a head's own k, a mapped query recovers from k' part of q · k. To second
order, the change in attention is the variance of the logits' error under the attention weights. So the key moments are
centred on the mean key, weighted by attention, at the distances between queries and keys. Alternate between solving for
keys and for queries, starting from `pca`. Values and outputs are those of `pca`, which are optimal already.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from convert.layer_tensors.head_matrices import Real
from convert.merging.methods import pca
from convert.merging.moments import Maps, Moments, head_selector

Integers = NDArray[np.int64]

ROUNDS = 8
_RIDGE = 1e-4
"""Ridge penalty on the change from the previous solution, as a share of the data's mean moment."""


def merge(moments: Moments) -> Maps:
    """Return the maps of one group's keys, queries, values and outputs."""
    return _alternate(moments, _with_queries(moments, pca.merge(moments)))


def alternatives(moments: Moments, maps: Maps, by_weights: Moments) -> tuple[Maps, Maps]:
    """Return two solutions other than `maps`, which may have a lower output error on the validation windows.

    The first has the shared key of `pca` by the weights alone. The second alternates from there.
    """
    keys_DF, queries_HDD = pca.share_keys(by_weights)
    start = _with_queries(moments, replace(maps, keys_DF=keys_DF, queries_HDD=queries_HDD))
    return start, _alternate(moments, start)


def _with_queries(moments: Moments, maps: Maps) -> Maps:
    """Return the maps with the best queries for the shared key."""
    return replace(maps, queries_HDD=_queries(moments, maps))


def _alternate(moments: Moments, maps: Maps) -> Maps:
    """Solve for keys and for queries alternately."""
    for _ in range(ROUNDS):
        maps = replace(maps, keys_DF=_keys(moments, maps))
        maps = _with_queries(moments, maps)
    return maps


def _queries(moments: Moments, maps: Maps) -> Real:
    """Return the best maps of the queries for the shared key."""
    shared_FD = moments.keys_FF @ maps.keys_DF.T
    power_DD = _with_ridge(maps.keys_DF @ shared_FD)
    queries = []
    for head, before_DD in enumerate(maps.queries_HDD):
        missing_DF = head_selector(moments, head) - before_DD.T @ maps.keys_DF
        queries.append(before_DD + np.linalg.solve(power_DD, (missing_DF @ shared_FD).T))
    return np.stack(queries)


def _keys(moments: Moments, maps: Maps) -> Real:
    """Return the map [D, F] to a better shared key for the queries' maps."""
    queried_HDD = maps.queries_HDD @ moments.queries_HDD
    metric_DD = (queried_HDD @ maps.queries_HDD.transpose(0, 2, 1)).sum(axis=0)
    target_DF = sum(queried_DD @ head_selector(moments, h) for h, queried_DD in enumerate(queried_HDD))
    keys_DF = maps.keys_DF
    if moments.n_rotary_pairs:
        keys_DF = _rotated_keys(moments, keys_DF, metric_DD, (target_DF - metric_DD @ keys_DF) @ moments.keys_FF)
    if 2 * moments.n_rotary_pairs < moments.head_dim:
        keys_DF = _unrotated_keys(moments, keys_DF, metric_DD, (target_DF - metric_DD @ keys_DF) @ moments.keys_FF)
    return keys_DF


def _unrotated_keys(moments: Moments, keys_DF: Real, metric_DD: Real, slope_DF: Real) -> Real:
    """Return the map with the best linear map of the unrotated dimensions of all keys."""
    unrotated = np.arange(2 * moments.n_rotary_pairs, moments.head_dim)
    columns = (np.arange(moments.n_keys)[:, None] * moments.head_dim + unrotated).flatten()
    slope = np.linalg.solve(_with_ridge(metric_DD[np.ix_(unrotated, unrotated)]), slope_DF[np.ix_(unrotated, columns)])
    step = np.linalg.solve(_with_ridge(moments.keys_FF[np.ix_(columns, columns)]), slope.T).T
    keys_DF = keys_DF.copy()
    keys_DF[np.ix_(unrotated, columns)] += step
    return keys_DF


def _rotated_keys(moments: Moments, old_DF: Real, metric_DD: Real, slope_DF: Real) -> Real:
    """Return the map with the best complex factor for each key and rotated pair."""
    rows_N2, columns_N2, signs_2N = _basis(moments)
    slope_N, curvature_NN = np.zeros(len(rows_N2)), np.zeros((len(rows_N2), len(rows_N2)))
    for i in range(2):
        slope_N += signs_2N[i] * slope_DF[rows_N2[:, i], columns_N2[:, i]]
        for j in range(2):
            products_NN = metric_DD[np.ix_(rows_N2[:, i], rows_N2[:, j])]
            products_NN = products_NN * moments.keys_FF[np.ix_(columns_N2[:, i], columns_N2[:, j])]
            curvature_NN += signs_2N[i][:, None] * signs_2N[j] * products_NN
    step_N = np.linalg.solve(_with_ridge(curvature_NN), slope_N)
    keys_DF = old_DF.copy()
    for i in range(2):
        np.add.at(keys_DF, (rows_N2[:, i], columns_N2[:, i]), signs_2N[i] * step_N)
    return keys_DF


def _basis(moments: Moments) -> tuple[Integers, Integers, Real]:
    """Return the entries of the maps that commute with rotary embeddings: rows, columns and signs, two per real number.

    The first half of the numbers are the real parts for all pairs of all keys, the second half the imaginary parts.
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
    ridge = _RIDGE * np.trace(matrix) / len(matrix) or 1.0
    ridged: Real = matrix + ridge * np.eye(len(matrix))
    return ridged
