"""Turn the heads of each group until they are as alike as can be, and take the mean (Jin et al., arXiv:2412.20677).

Heads of a trained model are hardly alike as they stand, because each has coordinates of its own that nobody sees: any
rotation of a value head can be undone in the output projection, and any turn of a key's rotary plane in its queries. So
values are aligned by orthogonal maps (generalised Procrustes, their section 3.2), the planes of keys by turns; key
dimensions that do not rotate by orthogonal maps too.
"""

import numpy as np

from convert.merging.moments import Maps, Moments, key_planes, scaled_planes
from convert.merging.weights import Complex, Real

_ROUNDS = 100
_GAIN = 1e-10


def merge(moments: Moments) -> Maps:
    """Return how one group's heads are turned and averaged."""
    keys_KDD, values_KDD = alignment(moments)
    per_key = len(moments.queries_HDD) // moments.n_keys
    return Maps(
        keys_DF=np.concatenate(list(keys_KDD), axis=1) / moments.n_keys,
        queries_HDD=np.repeat(keys_KDD, per_key, axis=0),
        values_DF=np.concatenate(list(values_KDD), axis=1) / moments.n_keys,
        outputs_HDD=np.repeat(values_KDD.transpose(0, 2, 1), per_key, axis=0),
    )


def alignment(moments: Moments) -> tuple[Real, Real]:
    """Return orthogonal maps for each key and each value head, which make the group's as alike as they can be."""
    n, size, rotated = moments.n_keys, moments.head_dim, 2 * moments.n_rotary_pairs
    turns_KP = np.array([_turns(plane_KK) for plane_KK in key_planes(moments)], dtype=complex).reshape(-1, n).T
    keys_KDD = scaled_planes(turns_KP, size).reshape(size, n, size).transpose(1, 0, 2).copy()
    blocks_KDKD = moments.keys_FF.reshape(n, size, n, size)
    keys_KDD[:, rotated:, rotated:] = _rotations(blocks_KDKD[:, rotated:, :, rotated:])
    return keys_KDD, _rotations(moments.values_FF.reshape(n, size, n, size))


def _turns(plane_KK: Complex) -> Complex:
    """Return a complex number of length 1 for each key, which together make their sum as long as can be."""
    turns_K, length = np.ones(len(plane_KK), dtype=complex), 0.0
    for _ in range(_ROUNDS):
        product_K = turns_K @ plane_KK  # of each key with the sum as it is now
        turns_K = np.where(np.abs(product_K) > 0, np.exp(1j * np.angle(product_K)), turns_K)
        length, before = float((turns_K @ plane_KK @ turns_K.conj()).real), length
        if length <= before * (1 + _GAIN):
            break
    return turns_K


def _rotations(heads_KDKD: Real) -> Real:
    """Return an orthogonal map for each head, which together make the heads' sum as long as can be."""
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
