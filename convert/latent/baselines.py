"""Convert layers as published methods do, for comparison with ours.

- `transmla` (Meng et al. 2025, TransMLA, section 4): RoRoPE and balanced PCA. FreqFold only joins pairs that must share
  a channel: the first s, the next s and so on, each fold with the frequency of its first pair. Its larger folds are
  left out (docs/study/latent.md has figures). In each fold, the shared rotated key is the first principal component
  over heads and pairs by a real rotation, alike for real and imaginary parts. The rest of the keys loses its rotation.
  The latent is the PCA of the activations of this rest and of the values, balanced by their root mean squares. Queries
  only undo the maps of keys.
- `care` (2026, arXiv 2603.17946): the same rotated key. The latent is the SVD of the weights of both, whitened by the
  inputs' second moment. Its allocation of ranks to layers is left out: the class has one size for all layers.
- `svd`: the shared rotated key is the mean over K/V heads (X-EcoMLA, Li et al. 2025), the latent the SVD of the weights
  (MHA2MLA, Ji et al. 2025), without any text.

Letters: H query heads, K key/value heads, D head_dim, P pairs (D/2), F numbers of a fold (its pairs, of all K/V
heads), C channels of the rotated key, L latent, X inputs, W rows of keys and values of all heads.
"""

import numpy as np

from convert.latent import LatentMethod
from convert.latent.closed_form import InputMoments, LatentTarget, join_parts
from convert.latent.matrices import LatentMatrices
from convert.layer_tensors.head_matrices import HeadMatrices, Real


def solve_as(method: LatentMethod, before: HeadMatrices, moments: InputMoments, target: LatentTarget) -> LatentMatrices:
    """Return the latent attention of a layer by a published method."""
    sizes = target.sizes
    half, n_kv_heads, heads_per_group = sizes.head_dim // 2, sizes.n_kv_heads, before.heads_per_group
    q_HPX, k_KPX = (heads[:, :half] + 1j * heads[:, half:] for heads in (before.q_HDX, before.k_KDX))
    rest_KPX = k_KPX.copy()
    query_HCX = np.zeros((sizes.n_heads, sizes.qk_rope_head_dim // 2, sizes.hidden_size), dtype=np.complex128)
    key_CX = np.zeros((sizes.qk_rope_head_dim // 2, sizes.hidden_size), dtype=np.complex128)
    for channel, pairs in enumerate(np.split(np.arange(half), len(key_CX))):
        keys_FX = k_KPX[:, pairs].reshape(-1, sizes.hidden_size)
        if method == "svd":
            weights_F = np.full(len(keys_FX), len(keys_FX) ** -0.5)
        else:
            power_FF = (keys_FX @ moments.tokens_XX @ keys_FX.conj().T).real
            weights_F = np.linalg.eigh(power_FF)[1][:, -1]
        key_CX[channel] = weights_F @ keys_FX
        rest_KPX[:, pairs] -= (weights_F[:, None] * key_CX[channel]).reshape(n_kv_heads, len(pairs), -1)
        weights_KP = weights_F.reshape(n_kv_heads, len(pairs))
        query_HCX[:, channel] = np.einsum("hp,hpx->hx", weights_KP.repeat(heads_per_group, axis=0), q_HPX[:, pairs])
    rest_KDX = np.concatenate([rest_KPX.real, rest_KPX.imag], axis=1)
    latent = _latent(method, rest_KDX, before.v_KDX, moments, sizes.latent_dim)
    return join_parts(before, query_HCX, key_CX, latent, target)


def _latent(
    method: LatentMethod, rest_KDX: Real, v_KDX: Real, moments: InputMoments, size: int
) -> tuple[Real, Real, Real]:
    """Return the latent, and its maps to unrotated keys and values."""
    keys_WX, values_WX = (heads.reshape(-1, heads.shape[2]) for heads in (rest_KDX, v_KDX))
    ratio = 1.0
    if method == "transmla":
        key_power, value_power = (float(((rows @ moments.tokens_XX) * rows).sum()) for rows in (keys_WX, values_WX))
        ratio = np.sqrt(key_power / value_power) if key_power and value_power else 1.0
    rows_WX = np.concatenate([keys_WX / ratio, values_WX])
    power_WW = rows_WX @ (rows_WX.T if method == "svd" else moments.tokens_XX @ rows_WX.T)
    vectors_WL = np.linalg.eigh(power_WW)[1][:, ::-1][:, :size]
    keys_WL, values_WL = np.split(vectors_WL, 2)
    k_KDL, v_KDL = (part.reshape(*rest_KDX.shape[:2], -1) for part in (keys_WL * ratio, values_WL))
    return vectors_WL.T @ rows_WX, k_KDL, v_KDL
