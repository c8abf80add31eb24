"""Share the first principal components of K and V heads, in closed form. Coordinates change, nothing else does.

Keys: multiplying a RoPE pair by a complex number, and its queries by the conjugate inverse, leaves the logits
unchanged. So the keys of a group can be complex multiples of one shared number in each pair. The best such number is
the first principal component of the keys' numbers, each weighted by the power of its queries.

Values: any invertible map can be inserted between values and output projection. So a group's contribution to the output
is one matrix per query head, O_h V_h. The best shared V is spanned by the first head_dim principal components of the
stacked outputs of those matrices. Unrotated key dimensions are shared in the same way.
"""

from contextlib import suppress

import numpy as np

from convert.layer_tensors.head_matrices import Complex, Real
from convert.merging.moments import Maps, Moments, key_pair_moments, pair_scaling_map
from model.common.errors import CheckpointError

_TINY = 1e-9
RIDGES = (1e-9, 1e-6, 1e-5, 1e-4)
"""Shares of the mean moment that are added to the diagonal of moments, in turn."""


def merge(moments: Moments) -> Maps:
    """Return the maps of one group to its first principal components."""
    keys_DF, queries_HDD = share_keys(moments)
    size = moments.head_dim
    values_DF, outputs_HDD = best_shared_heads(moments.outputs_HDD, moments.values_FF, size)
    return Maps(keys_DF, queries_HDD, values_DF, outputs_HDD)


def share_keys(moments: Moments) -> tuple[Real, Real]:
    """Return the map [D, F] of all keys to the shared one, and the maps [H, D, D] of the queries."""
    n_rotary_pairs, size = moments.n_rotary_pairs, moments.head_dim
    queries_per_key = len(moments.queries_HDD) // moments.n_keys
    power_HD = np.diagonal(moments.queries_HDD, axis1=1, axis2=2)
    power_HP = power_HD[:, :n_rotary_pairs] + power_HD[:, n_rotary_pairs : 2 * n_rotary_pairs]
    weights_KP = np.sqrt(power_HP.reshape(moments.n_keys, queries_per_key, -1).sum(axis=1))
    mix_KP, factors_KP = _first_components(key_pair_moments(moments), weights_KP)
    keys_DF = pair_scaling_map(mix_KP, size)
    # key k ≈ factor · shared, so its queries are multiplied by the factor's conjugate
    queries_KDD = pair_scaling_map(factors_KP.conj(), size).reshape(size, -1, size).transpose(1, 0, 2)
    queries_HDD = np.repeat(queries_KDD, queries_per_key, axis=0)
    _share_unrotated(moments, keys_DF, queries_HDD)
    return keys_DF, queries_HDD


def _share_unrotated(moments: Moments, keys_DF: Real, queries_HDD: Real) -> None:
    """Fill in the unrotated dimensions. Their keys allow any linear map, as values do."""
    size, unrotated = moments.head_dim, slice(2 * moments.n_rotary_pairs, moments.head_dim)
    n_unrotated = size - 2 * moments.n_rotary_pairs
    if n_unrotated == 0:
        return
    columns = np.concatenate([np.arange(size)[unrotated] + k * size for k in range(moments.n_keys)])
    keys_FF = moments.keys_FF[np.ix_(columns, columns)]
    shared, backs = best_shared_heads(moments.queries_HDD[:, unrotated, unrotated], keys_FF, n_unrotated)
    if moments.raw_keys_FF is not None:
        shared, backs = _as_long_as_heads(shared, backs)
    keys_DF[unrotated, columns] = shared
    queries_HDD[:, unrotated, unrotated] = backs.transpose(0, 2, 1)


def _as_long_as_heads(shared_SF: Real, backs_HDS: Real) -> tuple[Real, Real]:
    """Rescale the dimensions of the shared keys, so that the norm gives them the scale that it gave the heads.

    The squared length of a token's shared key is then the mean over the heads of what the heads are mapped back to. Of
    all such coordinates these are nearest to the heads' own: where all heads are equal, they are the heads'.
    """
    values_S, vectors_SS = np.linalg.eigh((backs_HDS.transpose(0, 2, 1) @ backs_HDS).mean(axis=0))
    lengths_S = np.sqrt(np.maximum(values_S, _TINY * (values_S.max() or 1.0)))
    root_SS, inverse_SS = ((vectors_SS * x_S) @ vectors_SS.T for x_S in (lengths_S, 1 / lengths_S))
    u_SS, _, vt_SS = np.linalg.svd(backs_HDS.mean(axis=0) @ inverse_SS)
    rotation_SS = u_SS @ vt_SS
    return rotation_SS @ root_SS @ shared_SF, backs_HDS @ inverse_SS @ rotation_SS.T


def _first_components(pairs_PKK: Complex, weights_KP: Real) -> tuple[Complex, Complex]:
    """Return, [K, P] each: the weights of the keys in each pair's shared number, and its factor for each key."""
    weights_PK = np.maximum(weights_KP, _TINY * (weights_KP.max(initial=0.0) or 1.0)).T
    _, vectors_PKK = np.linalg.eigh(pairs_PKK * weights_PK[:, :, None] * weights_PK[:, None, :])
    first_PK = vectors_PKK[..., -1]
    # The phase of an eigenvector is arbitrary: choose it so that the strongest key is not rotated.
    strongest_P1 = np.abs(first_PK).argmax(axis=1)[:, None]
    first_PK = first_PK * np.exp(-1j * np.angle(np.take_along_axis(first_PK, strongest_P1, axis=1)))
    mix_PK = first_PK.conj() * weights_PK
    power_P = np.einsum("pk,pkl,pl->p", mix_PK, pairs_PKK, mix_PK.conj(), optimize=True).real
    mean_P = np.einsum("pkk->p", pairs_PKK).real / pairs_PKK.shape[1]
    scale_P1 = np.sqrt(np.where(power_P > 0, mean_P / np.where(power_P > 0, power_P, 1), 1.0))[:, None]
    scale_P1 = np.maximum(scale_P1, 1e-300)
    return (mix_PK * scale_P1).T, (first_PK / weights_PK / scale_P1).T


def best_shared_heads(metric_HDD: Real, heads_FF: Real, size: int) -> tuple[Real, Real]:
    """Return the map [size, F] of all heads to the best shared one, and the maps `back` [H, D, size] from it to each.

    The best head minimises Σ_h E|x_h − back_h · shared|² in each query head's metric. It has the heads' mean power.
    """
    n_heads, dim = metric_HDD.shape[:2]
    queries_per_key = n_heads * dim // len(heads_FF)
    root_FF = _root(heads_FF)
    metric_KDD = metric_HDD.reshape(-1, queries_per_key, dim, dim).sum(axis=1)
    weighted_FF = (metric_KDD @ root_FF.reshape(-1, dim, len(root_FF))).reshape(root_FF.shape)
    _, vectors_FF = np.linalg.eigh(root_FF.T @ weighted_FF)  # eigenvalues in ascending order
    first_FS = np.array(vectors_FF[:, -size:])[:, ::-1]  # a copy, so that the other eigenvectors can be freed
    del vectors_FF
    first_FS = first_FS * np.where(np.take_along_axis(first_FS, np.abs(first_FS).argmax(0)[None], 0) < 0, -1.0, 1.0)
    back_FS = root_FF @ first_FS
    shared_SF = np.linalg.solve(root_FF.T, first_FS).T
    length = np.sqrt(np.trace(heads_FF) / len(heads_FF)) or 1.0
    backs_KDS = back_FS.reshape(-1, dim, size) / length
    return shared_SF * length, np.repeat(backs_KDS, queries_per_key, axis=0)


def _root(heads_FF: Real) -> Real:
    """Return the Cholesky factor with the smallest ridge that allows one.

    Key moments are sums of float32 products. Where keys have fewer independent dimensions than numbers, rounding can
    make an eigenvalue slightly negative; then the ridge grows.
    """
    mean = float(np.trace(heads_FF) / len(heads_FF))
    for ridge in RIDGES:
        ridged_FF: Real = heads_FF.copy()
        ridged_FF[np.diag_indices_from(ridged_FF)] += ridge * mean or 1.0
        with suppress(np.linalg.LinAlgError):
            return np.asarray(np.linalg.cholesky(ridged_FF))
    raise CheckpointError("the second moments of a layer's heads are not positive definite; use --method mean.")
