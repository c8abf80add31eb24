"""Turn the heads of each group until they are as alike as can be, and take the mean (Jin et al., arXiv:2412.20677).

Heads of a trained model are hardly alike as they stand, because each has coordinates of its own that nobody sees: any
rotation of a value head can be undone in the output projection, and any turn of a key's rotary plane in its queries. So
values are aligned by orthogonal maps (generalised Procrustes, their section 3.2), the planes of keys by turns.

A mean is shorter than its members where they still differ; it is given their mean length.
"""

from dataclasses import replace

import numpy as np

from convert.attention import Complex, LayerAttention, Real, join, map_values, planes, scale_planes

_ROUNDS = 100
_GAIN = 1e-10


def merge(attention: LayerAttention, n_kv_heads: int, root_XX: Real | None) -> LayerAttention:
    """Return one layer's attention with `n_kv_heads` K/V heads. `root_XX` is a root of the inputs' second moments.

    Without it all directions of the input count alike.
    """
    return join([_merge_group(align(group, root_XX)) for group in attention.groups(n_kv_heads)])


def align(group: LayerAttention, root_XX: Real | None) -> LayerAttention:
    """Return attention that computes the same, whose K heads are as alike as they can be, and whose V heads too."""
    k_KPX = planes(_seen(group.k_KDX, root_XX), group.n_planes)
    turns_KP = np.stack([_turns(k_KPX[:, p]) for p in range(group.n_planes)], axis=1)
    return map_values(scale_planes(group, turns_KP), _rotations(_seen(group.v_KDX, root_XX)))


def _merge_group(group: LayerAttention) -> LayerAttention:
    return replace(group, k_KDX=_mean(group.k_KDX), v_KDX=_mean(group.v_KDX))


def _mean(heads_KDX: Real) -> Real:
    """Return the mean as the one head, with the members' mean norm."""
    mean_1DX: Real = heads_KDX.mean(axis=0, keepdims=True)
    norm = float(np.linalg.norm(mean_1DX))
    wanted = float(np.linalg.norm(heads_KDX.reshape(len(heads_KDX), -1), axis=1).mean())
    return mean_1DX * (wanted / norm if norm > 0 else 1.0)


def _seen(heads_KDX: Real, root_XX: Real | None) -> Real:
    return heads_KDX if root_XX is None else heads_KDX @ root_XX


def _turns(z_KX: Complex) -> Complex:
    """Return a complex number of length 1 for each row, which together make the rows' sum as long as can be."""
    turns_K = np.ones(len(z_KX), dtype=complex)
    target_X, length = z_KX[0], 0.0
    for _ in range(_ROUNDS):
        product_K = z_KX.conj() @ target_X
        turns_K = np.where(np.abs(product_K) > 0, np.exp(1j * np.angle(product_K)), turns_K)
        target_X = turns_K @ z_KX
        length, before = float(np.linalg.norm(target_X)), length
        if length <= before * (1 + _GAIN):
            break
    return turns_K


def _rotations(v_KDX: Real) -> Real:
    """Return an orthogonal map for each head, which together make the heads' sum as long as can be."""
    target_DX, length = v_KDX[0], 0.0
    maps_KDD = np.stack([np.eye(v_KDX.shape[1])] * len(v_KDX))
    for _ in range(_ROUNDS):
        u_KDD, _, vt_KDD = np.linalg.svd(target_DX @ v_KDX.transpose(0, 2, 1))
        maps_KDD = u_KDD @ vt_KDD
        target_DX = (maps_KDD @ v_KDX).sum(axis=0)
        length, before = float(np.linalg.norm(target_DX)), length
        if length <= before * (1 + _GAIN):
            break
    return maps_KDD
