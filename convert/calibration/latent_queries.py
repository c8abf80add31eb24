"""Solve for the queries that read a latent and a rotated key, by least squares on the logits.

To second order, a change of a query's logits changes its attention by their variance under the attention weights. So
keys are drawn with these weights, rotated to their distance from the query, and taken relative to their mean. The best
linear map from what is cached (the rotated key and the latent) to a head's own keys then gives both its rotated queries
and its unrotated keys. It also makes up for channels whose frequency is not that of the RoPE pairs they stand for.

Letters: S queries of a window, C keys drawn for each, N those of all queries (S·C), H query heads, K key/value heads, D
head_dim, R rotated dimensions, P pairs of these, L dimensions of the latent, Z = R + L, T tokens, X inputs (the hidden
size).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from convert.calibration.input_moments import DrawnKeys
from convert.latent.closed_form import LatentTarget
from convert.latent.matrices import LatentMatrices
from convert.layer_tensors.head_matrices import HeadMatrices
from convert.layers.layer_stream import CalibrationLayer
from model.decoder.devices import float64_device, to_float64
from model.decoder.rope import cos_sin, rotate

_RIDGE = 1e-3
"""Ridge penalty, as a share of each feature's power."""


def solve_queries(
    layer: CalibrationLayer,
    before: HeadMatrices,
    latent: LatentMatrices,
    target: LatentTarget,
    drawn_keys: Sequence[tuple[int, DrawnKeys]],
) -> LatentMatrices:
    """Return the latent attention with other rotated queries and unrotated keys.

    `drawn_keys`: of the windows to fit on, by index.
    """
    sizes, device = target.sizes, layer.runnable.device
    keys_CX, shared_ZX = (
        torch.from_numpy(np.ascontiguousarray(rows)).float().to(device)
        for rows in (before.k_KDX.reshape(-1, sizes.hidden_size), np.concatenate([latent.key_RX, latent.latent_LX]))
    )
    source_frequencies_P, target_frequencies_C = (
        torch.from_numpy(np.asarray(frequencies)).float().to(device)
        for frequencies in (target.source_rope.frequencies, target.frequencies_C)
    )
    n_heads, size, sums_device = sizes.n_heads, sizes.head_dim, float64_device(device)
    power_HZZ = torch.zeros(n_heads, len(shared_ZX), len(shared_ZX), dtype=torch.float64, device=sums_device)
    cross_HZD = torch.zeros(n_heads, len(shared_ZX), size, dtype=torch.float64, device=sums_device)
    for window, drawn in drawn_keys:
        x_TX = layer.inputs([window])[0]
        keys_TKD, shared_TZ = (x_TX @ keys_CX.T).view(len(x_TX), -1, size), x_TX @ shared_ZX.T
        for head in range(n_heads):
            at_SC = drawn.key_positions_HSC[head].to(device)
            distance_SC = at_SC - drawn.query_positions_S.to(device)[:, None]
            own_keys_SCD = keys_TKD[at_SC, head // (n_heads // sizes.n_kv_heads)]
            key_SCD = _relative(own_keys_SCD, distance_SC, source_frequencies_P)
            shared_SCZ = shared_TZ[at_SC]
            rotated_SCR = _relative(shared_SCZ[..., : sizes.qk_rope_head_dim], distance_SC, target_frequencies_C)
            features_NZ = _centred(torch.cat([rotated_SCR, shared_SCZ[..., sizes.qk_rope_head_dim :]], dim=-1))
            power_HZZ[head] += to_float64(features_NZ.T @ features_NZ)
            cross_HZD[head] += to_float64(features_NZ.T @ _centred(key_SCD))
    diagonal_HZ = power_HZZ.diagonal(dim1=1, dim2=2)
    diagonal_HZ += _RIDGE * diagonal_HZ + (1e-12 * diagonal_HZ.mean() or 1.0)
    read_HZD = torch.linalg.solve(power_HZZ, cross_HZD).cpu().numpy()
    q_HDX = latent.q_HNX[:, :size]
    k_HNL = np.zeros_like(latent.k_HNL)
    k_HNL[:, :size] = read_HZD[:, sizes.qk_rope_head_dim :].swapaxes(1, 2)
    return replace(latent, q_HRX=read_HZD[:, : sizes.qk_rope_head_dim] @ q_HDX, k_HNL=k_HNL)


def _relative(heads_SCR: Tensor, distance_SC: Tensor, frequencies_P: Tensor) -> Tensor:
    """Rotate each key by the angles of its distance from the query."""
    return rotate(heads_SCR, *cos_sin(distance_SC[..., None] * frequencies_P))


def _centred(keys_SCZ: Tensor) -> Tensor:
    """Return the keys of each query relative to their mean, all in one axis."""
    return (keys_SCZ - keys_SCZ.mean(dim=1, keepdim=True)).flatten(0, 1)
