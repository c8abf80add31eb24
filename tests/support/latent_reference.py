"""Latent attention in float64, by the definition.

Letters: T tokens, H query heads, N unrotated dimensions of a query head, R rotated ones, P their pairs, L numbers of
the latent, D dimensions of a value head, X inputs (the hidden size), M outputs.
"""

import numpy as np

from convert.latent.matrices import LatentMatrices
from convert.layer_tensors.head_matrices import Real


def attend(attention: LatentMatrices, x_TX: Real, frequencies_P: Real) -> Real:
    """Return the attention's output for one text, [T, M]. `frequencies_P`: of the R/2 rotated pairs."""
    n_tokens, n_pairs = len(x_TX), len(frequencies_P)
    angles_TP = np.outer(np.arange(n_tokens), frequencies_P)

    def rotated(heads_TR: Real) -> Real:
        a_TP, b_TP = heads_TR[..., :n_pairs], heads_TR[..., n_pairs:]
        cos_TP, sin_TP = np.cos(angles_TP), np.sin(angles_TP)
        return np.concatenate([a_TP * cos_TP - b_TP * sin_TP, b_TP * cos_TP + a_TP * sin_TP], axis=-1)

    latent_TL, key_TR = x_TX @ attention.latent_LX.T, rotated(x_TX @ attention.key_RX.T)
    out_TM = np.zeros((n_tokens, attention.o_HMD.shape[1]))
    hidden_TT = np.triu(np.ones((n_tokens, n_tokens), dtype=bool), 1)
    for q_NX, q_RX, k_NL, v_DL, o_MD in zip(
        attention.q_HNX, attention.q_HRX, attention.k_HNL, attention.v_HDL, attention.o_HMD, strict=True
    ):
        logits_TT = (x_TX @ q_NX.T) @ (latent_TL @ k_NL.T).T + rotated(x_TX @ q_RX.T) @ key_TR.T
        logits_TT = np.where(hidden_TT, -np.inf, logits_TT / np.sqrt(v_DL.shape[0]))
        weights_TT = np.exp(logits_TT - logits_TT.max(axis=1, keepdims=True))
        weights_TT /= weights_TT.sum(axis=1, keepdims=True)
        out_TM += weights_TT @ (latent_TL @ v_DL.T) @ o_MD.T
    return out_TM
