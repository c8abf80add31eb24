"""Hold one layer's latent attention without its norm, in float64.

Letters: H query heads, N unrotated dimensions of a query head, R rotated ones, P pairs of these, L dimensions of the
latent, D dimensions of a value head, U = H·(N + D), X inputs (the hidden size), M outputs.
"""

from dataclasses import dataclass, replace

import numpy as np

from convert.layer_tensors.head_matrices import Real

ROUNDS = 4
"""Times that latent and heads are scaled in turn, since either changes what the other needs."""
_ROUND_OFF = 1e-9
"""Weights below this share of the largest of their kind are left as they are."""


@dataclass(frozen=True)
class LatentMatrices:
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

    def balanced(self, keep_output: bool) -> "LatentMatrices":
        """Return the same function with weights of similar size on both sides of every product of two matrices.

        The numbers between two matrices can be scaled up in one and down in the other. That is done here for the
        latent, for each head's unrotated keys and values, and for the rotated pairs: it brings the root mean squares of
        the weights on both sides within about a factor of two. `keep_output` leaves the values and with them the output
        projection. An optimizer like Adam moves all weights by the same amount, so small ones beside large ones would
        be lost in training. The factors are powers of two: nothing is rounded.
        """
        balanced = self
        for _ in range(ROUNDS):
            balanced = balanced._with_scaled_latent()._with_scaled_keys()
            if not keep_output:
                balanced = balanced._with_scaled_values()
        return balanced

    def _with_scaled_latent(self) -> "LatentMatrices":
        up_UL = np.concatenate([self.k_HNL, self.v_HDL], axis=1).reshape(-1, len(self.latent_LX))
        used_UL = up_UL[np.any(up_UL, axis=1)]  # not what pads the keys
        factor_L = _factor(_rms(self.latent_LX, 1), _rms(used_UL, 0) if len(used_UL) else np.zeros(len(self.latent_LX)))
        return replace(
            self,
            latent_LX=self.latent_LX * factor_L[:, None],
            k_HNL=self.k_HNL / factor_L,
            v_HDL=self.v_HDL / factor_L,
        )

    def _with_scaled_keys(self) -> "LatentMatrices":
        key_HN1 = _factor(_rms(self.k_HNL, 2), _rms(self.q_HNX, 2))[:, :, None]
        n_heads, n_rotated, n_inputs = self.q_HRX.shape
        pairs = (2, n_rotated // 2, n_inputs)  # a rotation mixes both dimensions of a pair
        pair_P = _factor(_rms(self.key_RX.reshape(pairs), (0, 2)), _rms(self.q_HRX.reshape(n_heads, *pairs), (0, 1, 3)))
        rotated_R1 = np.tile(pair_P, 2)[:, None]
        return replace(
            self,
            q_HNX=self.q_HNX / key_HN1,
            k_HNL=self.k_HNL * key_HN1,
            q_HRX=self.q_HRX / rotated_R1,
            key_RX=self.key_RX * rotated_R1,
        )

    def _with_scaled_values(self) -> "LatentMatrices":
        value_HD1 = _factor(_rms(self.v_HDL, 2), _rms(self.o_HMD, 1))[:, :, None]
        return replace(self, v_HDL=self.v_HDL * value_HD1, o_HMD=self.o_HMD / value_HD1.transpose(0, 2, 1))


def _rms(weights: Real, axes: int | tuple[int, ...]) -> Real:
    return np.asarray(np.sqrt(np.mean(weights**2, axis=axes)))


def _factor(made: Real, read: Real) -> Real:
    """Return powers of two f for which `made · f` and `read / f` have about the same size.

    1 where one is 0, or a round-off beside the largest.
    """
    both = (made > _ROUND_OFF * made.max()) & (read > _ROUND_OFF * read.max())
    ratio = np.where(both, read, 1.0) / np.where(both, made, 1.0)
    return np.asarray(np.exp2(np.round(np.log2(ratio) / 2)))
