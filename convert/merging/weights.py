"""Hold the weights of one layer's attention as heads, in float64.

H query heads, K key/value heads, D head_dim, P rotary planes, X inputs (hidden size, and a constant 1 where there are
biases), M outputs.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]


@dataclass(frozen=True)
class LayerAttention:
    """The weights of one layer's attention, in float64. A bias is the last column, for a constant input of 1.

    The first `2 * n_rotary_pairs` dimensions of a head are rotated by position, dimension i with i + n_rotary_pairs
    (Hugging Face's half-split order). The others are not rotated.
    """

    q_HDX: Real
    k_KDX: Real
    v_KDX: Real
    o_HMD: Real
    n_rotary_pairs: int

    @property
    def heads_per_group(self) -> int:
        return len(self.q_HDX) // len(self.k_KDX)

    def groups(self, n_kv_heads: int) -> list["LayerAttention"]:
        """Return the attention of each group of neighbouring heads that will share a K/V head."""
        q, k = len(self.q_HDX) // n_kv_heads, len(self.k_KDX) // n_kv_heads
        return [
            replace(
                self,
                q_HDX=self.q_HDX[g * q : (g + 1) * q],
                k_KDX=self.k_KDX[g * k : (g + 1) * k],
                v_KDX=self.v_KDX[g * k : (g + 1) * k],
                o_HMD=self.o_HMD[g * q : (g + 1) * q],
            )
            for g in range(n_kv_heads)
        ]


def half_split_order(head_dim: int, n_rotary_pairs: int, pairing: Literal["half", "interleaved"]) -> NDArray[np.intp]:
    """Return a checkpoint's dimensions of a query or key head in the order of LayerAttention.

    `pairing`: which dimensions the model rotates together (`Family.rotary_pairing`).
    """
    order = np.arange(head_dim)
    if pairing == "interleaved":
        rotated = slice(0, 2 * n_rotary_pairs)
        order[rotated] = order[rotated].reshape(-1, 2).T.flatten()
    return order


def join(groups: list[LayerAttention]) -> LayerAttention:
    """Concatenate the heads of groups into one attention."""
    return replace(
        groups[0],
        q_HDX=np.concatenate([group.q_HDX for group in groups]),
        k_KDX=np.concatenate([group.k_KDX for group in groups]),
        v_KDX=np.concatenate([group.v_KDX for group in groups]),
        o_HMD=np.concatenate([group.o_HMD for group in groups]),
    )
