"""Align the heads of each group by rotations, and average them (Jin et al., arXiv:2412.20677).

Raw heads of a trained model have low cosines, because each head has its own arbitrary coordinates: the output
projection can undo any rotation of a value head, and the queries can undo any rotation of a key's RoPE pair. So
values are aligned by orthogonal maps (generalised Procrustes, their section 3.2), and the RoPE pairs of keys by
rotations of pairs. Unrotated key dimensions are aligned by orthogonal maps too.
"""

import numpy as np

from convert.layer_tensors.head_matrices import Complex, Real
from convert.merging.moments import Maps, Moments, key_pair_moments, pair_scaling_map

_ROUNDS = 100
_GAIN = 1e-10


def merge(moments: Moments) -> Maps:
    """Return the maps that align and average one group's heads."""
    keys_KDD, values_KDD = alignment(moments)
    queries_per_key = len(moments.queries_HDD) // moments.n_keys
    return Maps(
        keys_DF=np.concatenate(list(keys_KDD), axis=1) / moments.n_keys,
        queries_HDD=np.repeat(keys_KDD, queries_per_key, axis=0),
        values_DF=np.concatenate(list(values_KDD), axis=1) / moments.n_keys,
        outputs_HDD=np.repeat(values_KDD.transpose(0, 2, 1), queries_per_key, axis=0),
    )


def alignment(moments: Moments) -> tuple[Real, Real]:
    """Return an orthogonal map for each key head and each value head, [K, D, D], that best align the group."""
    n, size, rotated = moments.n_keys, moments.head_dim, 2 * moments.n_rotary_pairs
    phases_KP = np.array([_phases(pair_KK) for pair_KK in key_pair_moments(moments)], dtype=complex).reshape(-1, n).T
    keys_KDD = pair_scaling_map(phases_KP, size).reshape(size, n, size).transpose(1, 0, 2).copy()
    blocks_KDKD = moments.keys_FF.reshape(n, size, n, size)
    keys_KDD[:, rotated:, rotated:] = _rotations(blocks_KDKD[:, rotated:, :, rotated:])
    return keys_KDD, _rotations(moments.values_FF.reshape(n, size, n, size))


def _phases(pair_KK: Complex) -> Complex:
    """Return a complex number of modulus 1 for each key that together maximise the norm of the keys' sum."""
    phases_K, length = np.ones(len(pair_KK), dtype=complex), 0.0
    for _ in range(_ROUNDS):
        product_K = phases_K @ pair_KK  # of each key with the current sum
        phases_K = np.where(np.abs(product_K) > 0, np.exp(1j * np.angle(product_K)), phases_K)
        length, before = float((phases_K @ pair_KK @ phases_K.conj()).real), length
        if length <= before * (1 + _GAIN):
            break
    return phases_K


def _rotations(heads_KDKD: Real) -> Real:
    """Return an orthogonal map for each head, [K, D, D], that together maximise the norm of the heads' sum."""
    n, size = heads_KDKD.shape[:2]
    maps_KDD, length = np.stack([np.eye(size)] * n), 0.0
    for _ in range(_ROUNDS):
        product_KDD = np.einsum("bde,befg->fdg", maps_KDD, heads_KDKD, optimize=True)
        u_KDD, _, vt_KDD = np.linalg.svd(product_KDD)
        maps_KDD = u_KDD @ vt_KDD
        product_KDD = np.einsum("bde,befg->fdg", maps_KDD, heads_KDKD, optimize=True)
        length, before = float(np.einsum("fdg,fdg->", product_KDD, maps_KDD)), length
        if length <= before * (1 + _GAIN):
            break
    return maps_KDD
