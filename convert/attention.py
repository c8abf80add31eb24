"""One layer's attention as the merge methods see it, and the maps on it that leave what it computes unchanged.

H query heads, K key/value heads, D head_dim, P rotary planes, X inputs (hidden size, and a constant 1 where there are
biases), M outputs.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]


@dataclass(frozen=True)
class LayerAttention:
    """The weights of one layer's attention, in float64. A bias is the last column, which reads the constant 1.

    The first `2 * n_planes` dimensions of a head are rotated by position, dimension i with i + n_planes (Hugging Face's
    half-split order); the others are not.
    """

    q_HDX: Real
    k_KDX: Real
    v_KDX: Real
    o_HMD: Real
    n_planes: int

    @property
    def heads_per_group(self) -> int:
        return len(self.q_HDX) // len(self.k_KDX)

    def groups(self, n_kv_heads: int) -> list["LayerAttention"]:
        """Return the attention of the query heads that will share a K/V head, for each."""
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


def join(groups: list[LayerAttention]) -> LayerAttention:
    """Return the attention that consists of these, one after another."""
    return replace(
        groups[0],
        q_HDX=np.concatenate([group.q_HDX for group in groups]),
        k_KDX=np.concatenate([group.k_KDX for group in groups]),
        v_KDX=np.concatenate([group.v_KDX for group in groups]),
        o_HMD=np.concatenate([group.o_HMD for group in groups]),
    )


def planes(rows_NDX: Real, n_planes: int) -> Complex:
    """Return the rotated dimensions of heads as complex rows, [N, P, X].

    Rotary embeddings multiply plane i of every head at position m by the same exp(j·m·θ_i), so that a query and a key
    give Re(q · conj(k)), summed over planes, with the difference of their positions (Su et al. 2021, section 3.4).
    """
    return rows_NDX[:, :n_planes] + 1j * rows_NDX[:, n_planes : 2 * n_planes]


def with_planes(rows_NDX: Real, planes_NPX: Complex) -> Real:
    """Return heads with other rotated dimensions."""
    n_planes = planes_NPX.shape[1]
    rows_NDX = rows_NDX.copy()
    rows_NDX[:, :n_planes], rows_NDX[:, n_planes : 2 * n_planes] = planes_NPX.real, planes_NPX.imag
    return rows_NDX


def scale_planes(attention: LayerAttention, factors_KP: Complex) -> LayerAttention:
    """Multiply each plane of each key by a complex number, and those of its queries so that their products stay.

    Nothing else on the rotated dimensions commutes with rotary embeddings.
    """
    k_KPX = planes(attention.k_KDX, attention.n_planes) * factors_KP[..., None]
    of_queries_HP = np.repeat(1 / factors_KP.conj(), attention.heads_per_group, axis=0)
    q_HPX = planes(attention.q_HDX, attention.n_planes) * of_queries_HP[..., None]
    return replace(attention, q_HDX=with_planes(attention.q_HDX, q_HPX), k_KDX=with_planes(attention.k_KDX, k_KPX))


def map_values(attention: LayerAttention, maps_KDD: Real) -> LayerAttention:
    """Apply an invertible map to each value head, and its inverse where the output projection reads it."""
    inverse_HDD = np.repeat(np.linalg.inv(maps_KDD), attention.heads_per_group, axis=0)
    return replace(attention, v_KDX=maps_KDD @ attention.v_KDX, o_HMD=attention.o_HMD @ inverse_HDD)
