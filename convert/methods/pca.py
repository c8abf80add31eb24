"""The best shared K and V heads in the sense of least squares, in closed form.

Keys: multiplying a rotary plane by a complex number, and its queries by the conjugate inverse, changes nothing. So the
keys of a group may be complex multiples of one shared row in each plane, and the best such row is the first principal
component of theirs, each weighted by how strongly its queries read it.

Values: any invertible map may stand between values and output projection. So what a group adds to the output is one
matrix for each query head, O_h V_h, and the best V that all can share is spanned by the first head_dim right singular
vectors of those matrices, stacked.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from convert.attention import Complex, LayerAttention, Real, join, planes, with_planes


def merge(attention: LayerAttention, n_kv_heads: int, root_XX: Real | None) -> LayerAttention:
    """Return one layer's attention with `n_kv_heads` K/V heads. `root_XX` is a root of the inputs' second moments.

    Without it all directions of the input count alike.
    """
    return join([_share_values(_share_keys(group, root_XX), root_XX) for group in attention.groups(n_kv_heads)])


def _share_keys(group: LayerAttention, root_XX: Real | None) -> LayerAttention:
    per_key = group.heads_per_group
    k_KPX, q_HPX = planes(group.k_KDX, group.n_planes), planes(group.q_HDX, group.n_planes)
    power_HP = np.linalg.norm(_seen(q_HPX, root_XX), axis=2) ** 2
    weights_KP = np.sqrt(power_HP.reshape(len(k_KPX), per_key, -1).sum(axis=1))
    shared_PX, factors_KP = _first_components(k_KPX, _seen(k_KPX, root_XX), weights_KP)
    q_HPX = q_HPX * np.repeat(factors_KP.conj(), per_key, axis=0)[..., None]
    k_1DX = with_planes(group.k_KDX[:1], shared_PX[None])
    return replace(group, q_HDX=with_planes(group.q_HDX, q_HPX), k_KDX=k_1DX)


def _first_components(k_KPX: Complex, seen_KPX: Complex, weights_KP: Real) -> tuple[Complex, Complex]:
    """Return for each plane the shared row, and by what to multiply it to come closest to each key's."""
    weights_KP = np.maximum(weights_KP, 1e-9 * max(weights_KP.max(), 1e-300))
    weighted_PKX = (seen_KPX * weights_KP[..., None]).transpose(1, 0, 2)
    _, vectors_PKK = np.linalg.eigh(weighted_PKX @ weighted_PKX.conj().transpose(0, 2, 1))
    first_PK = vectors_PKK[..., -1]
    # An eigenvector is free to be turned: let the strongest key stand as it is.
    strongest_P1 = np.abs(first_PK).argmax(axis=1)[:, None]
    first_PK = first_PK * np.exp(-1j * np.angle(np.take_along_axis(first_PK, strongest_P1, axis=1)))
    mix_PK = first_PK.conj() * weights_KP.T
    shared_PX = np.einsum("pk,kpx->px", mix_PK, k_KPX)
    length_P = np.linalg.norm(np.einsum("pk,kpx->px", mix_PK, seen_KPX), axis=1)
    wanted_P = np.linalg.norm(seen_KPX, axis=2).mean(axis=0)
    scale_P = np.where(length_P > 0, wanted_P / np.where(length_P > 0, length_P, 1), 1.0)
    return shared_PX * scale_P[:, None], (first_PK / weights_KP.T / np.maximum(scale_P, 1e-300)[:, None]).T


def _share_values(group: LayerAttention, root_XX: Real | None) -> LayerAttention:
    head_dim = group.v_KDX.shape[1]
    q_HMD, r_HDD = np.linalg.qr(group.o_HMD)
    v_HDX = np.repeat(_seen(group.v_KDX, root_XX), len(group.o_HMD) // len(group.v_KDX), axis=0)
    stacked = (r_HDD @ v_HDX).reshape(-1, v_HDX.shape[2])
    left, lengths, right = np.linalg.svd(stacked, full_matrices=False)
    root_D = np.sqrt(lengths[:head_dim])
    left_HDD = left[:, :head_dim].reshape(-1, head_dim, head_dim)
    v_DX = root_D[:, None] * right[:head_dim]
    if root_XX is not None:
        v_DX = np.linalg.solve(root_XX.T, v_DX.T).T
    return replace(group, v_KDX=v_DX[None], o_HMD=q_HMD @ left_HDD * root_D)


def _seen(heads: Any, root_XX: Real | None) -> Any:
    return heads if root_XX is None else heads @ root_XX
