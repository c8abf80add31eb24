"""Hold one layer's latent attention without its norm, in float64, and compute it as a reference.

Letters: T tokens, H query heads, N unrotated dimensions of a query head, R rotated ones, L numbers of the latent, D
dimensions of a value head, X inputs (the hidden size), M outputs.
"""

from dataclasses import dataclass, replace

import numpy as np

from convert.merging.weights import Real


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention of one layer (DeepSeek-V2, section 2.1), with a latent that no norm changes.

    A token's latent is n = latent x and its rotated key is c = key x. Head h reads the keys (k_h n, rotated c) and the
    values v_h n. Logits are divided by the root of the source's head size. Rotated dimensions are in the half-split
    order: dimension i is rotated with i + R/2.
    """

    q_HNX: Real
    q_HRX: Real
    latent_LX: Real
    key_RX: Real
    k_HNL: Real
    v_HDL: Real
    o_HMD: Real

    def balanced(self) -> "LatentAttention":
        """Return the same function, with each of the latent's numbers scaled so that the weights on both sides match.

        Their root mean squares are then equal. An optimizer like Adam moves all weights by the same amount, so small
        ones beside large ones would be lost in training.
        """
        into_L = np.sqrt(np.mean(self.latent_LX**2, axis=1))
        up_UL = np.concatenate([self.k_HNL, self.v_HDL], axis=1).reshape(-1, len(into_L))
        used_UL = up_UL[np.any(up_UL, axis=1)]  # not what pads the keys
        out_of_L = np.sqrt(np.mean(used_UL**2, axis=0)) if len(used_UL) else np.zeros_like(into_L)
        both = (into_L > 0) & (out_of_L > 0)
        scale_L = np.sqrt(np.where(both, out_of_L, 1.0) / np.where(both, into_L, 1.0))
        return replace(
            self,
            latent_LX=self.latent_LX * scale_L[:, None],
            k_HNL=self.k_HNL / scale_L,
            v_HDL=self.v_HDL / scale_L,
        )


def attend(attention: LatentAttention, x_TX: Real, frequencies_F: Real) -> Real:
    """Return the attention's output for one text, [T, M]. `frequencies_F`: of the R/2 rotated pairs."""
    n_tokens, n_pairs = len(x_TX), len(frequencies_F)
    angles_TF = np.outer(np.arange(n_tokens), frequencies_F)

    def rotated(heads_TR: Real) -> Real:
        a_TF, b_TF = heads_TR[..., :n_pairs], heads_TR[..., n_pairs:]
        cos_TF, sin_TF = np.cos(angles_TF), np.sin(angles_TF)
        return np.concatenate([a_TF * cos_TF - b_TF * sin_TF, b_TF * cos_TF + a_TF * sin_TF], axis=-1)

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
