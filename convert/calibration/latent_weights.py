"""Hold a layer's latent attention as float32 matrices, and run it on a text.

Letters: B windows in a batch, T tokens, H query heads, N unrotated dimensions of a query head, R rotated ones, P pairs
of these, Q = N + R, L dimensions of the latent, D dimensions of a value head, C = heads · dimensions of one, X inputs
(the hidden size), M outputs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.attention import Mask, attend
from model.decoder.rope import cos_sin, rotate


@dataclass(frozen=True)
class LatentWeights:
    """Latent attention without its norm (`convert.latent.matrices`), and the frequencies of its rotated dimensions."""

    q_nope_CX: Tensor
    q_rope_CX: Tensor
    latent_LX: Tensor
    key_RX: Tensor
    k_CL: Tensor
    v_CL: Tensor
    o_MC: Tensor
    frequencies_P: Tensor
    head_dim: int

    def to(self, device: torch.device) -> "LatentWeights":
        """Return the weights on a device."""
        moved = self.with_matrices(*(matrix.to(device) for matrix in self))
        return replace(moved, frequencies_P=self.frequencies_P.to(device))

    def __iter__(self) -> Iterator[Tensor]:
        yield from (
            self.q_nope_CX, self.q_rope_CX, self.latent_LX, self.key_RX, self.k_CL, self.v_CL, self.o_MC
        )  # fmt: skip

    def with_matrices(self, *matrices: Tensor) -> "LatentWeights":
        """Return the weights with other matrices, in the order of iteration."""
        q_nope_CX, q_rope_CX, latent_LX, key_RX, k_CL, v_CL, o_MC = matrices
        return replace(
            self,
            q_nope_CX=q_nope_CX,
            q_rope_CX=q_rope_CX,
            latent_LX=latent_LX,
            key_RX=key_RX,
            k_CL=k_CL,
            v_CL=v_CL,
            o_MC=o_MC,
        )

    def heads_out(self, x_BTM: Tensor) -> Tensor:
        """Return the heads' outputs before the output projection, [B, T, H·D]. Gradients flow to the weights."""
        batch, length, _ = x_BTM.shape
        n_pairs, n_heads = len(self.frequencies_P), len(self.v_CL) // self.head_dim
        angles_TP = torch.arange(length, device=x_BTM.device)[:, None] * self.frequencies_P
        rotation = cos_sin(angles_TP[None, :, None])
        latent_BTL = F.linear(x_BTM, self.latent_LX)
        key_BT1R = rotate(F.linear(x_BTM, self.key_RX)[:, :, None], *rotation)
        q_rope_BTHR = rotate(F.linear(x_BTM, self.q_rope_CX).view(batch, length, n_heads, 2 * n_pairs), *rotation)
        q_nope_BTHN, k_nope_BTHN, v_BTHD = (
            F.linear(inputs, rows).view(batch, length, n_heads, -1)
            for inputs, rows in ((x_BTM, self.q_nope_CX), (latent_BTL, self.k_CL), (latent_BTL, self.v_CL))
        )
        q_BTHQ = torch.cat([q_nope_BTHN, q_rope_BTHR], dim=-1)
        k_BTHQ = torch.cat([k_nope_BTHN, key_BT1R.expand(-1, -1, n_heads, -1)], dim=-1)
        size = q_BTHQ.shape[3]
        padded_BTHQ = F.pad(v_BTHD, (0, size - self.head_dim))  # torch's fast kernel needs heads of one size
        out_BTHQ = attend(q_BTHQ * math.sqrt(size / self.head_dim), k_BTHQ, padded_BTHQ, Mask())
        return out_BTHQ[..., : self.head_dim].flatten(2)
