"""Hold the weights of one layer's attention as heads, in float64.

H query heads, K key/value heads, D head_dim, C = H·D, P RoPE pairs, X inputs (hidden size, and a constant 1 where
there are biases), M outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]


def join_heads(o_HMD: Real) -> Real:
    """Return an output projection as one matrix, [M, H·D]."""
    o_MC: Real = o_HMD.transpose(1, 0, 2).reshape(o_HMD.shape[1], -1)
    return o_MC


def split_heads(o_MC: Real, n_heads: int) -> Real:
    """Return an output projection by heads, [H, M, D], as a view of the matrix."""
    return o_MC.reshape(len(o_MC), n_heads, -1).transpose(1, 0, 2)


@dataclass(frozen=True)
class NormWeights:
    """The weights of a layer's norms of queries and of keys, in the half-split order.

    They have one row for each head, which are normalised together, or one row for heads that are normalised alone.
    """

    q_HD: Real
    k_KD: Real
    q_length: float
    k_length: float
    """Root mean square of the source's projected heads, for inputs of independent numbers."""
    per_head: bool
    """Whether each head is normalised alone. (One row does not tell: heads may also be merged to a single one.)"""

    def with_pair_means(self, n_rotary_pairs: int) -> "NormWeights":
        """Return the norms with weights that are equal for both dimensions of each RoPE pair."""
        q_HD, k_KD = (pair_means(weights_HD, n_rotary_pairs) for weights_HD in (self.q_HD, self.k_KD))
        return replace(self, q_HD=q_HD, k_KD=k_KD)


@dataclass(frozen=True)
class HeadMatrices:
    """The matrices of one layer's attention, in float64. A bias is the last column, for a constant input of 1.

    With norms, the rows of queries and keys are what a norm makes of them for inputs of average length: the
    projection's rows times the norm's weights. A norm divides each token's heads by their root mean square besides,
    which no linear map can express.

    The first `2 * n_rotary_pairs` dimensions of a head are rotated by position, dimension i with i + n_rotary_pairs
    (Hugging Face's half-split order). The others are not rotated.
    """

    q_HDX: Real
    k_KDX: Real
    v_KDX: Real
    o_HMD: Real
    n_rotary_pairs: int
    norms: NormWeights | None = None
    """None without norms, and for norms without weights."""

    @property
    def projections(self) -> tuple[Real, Real]:
        """The rows of the projections of queries and of keys, before norms, [H, D, X] and [K, D, X]."""
        if self.norms is None:
            return self.q_HDX, self.k_KDX
        # Where a weight is 0, the row is 0 too, and the projection's values cannot be recovered.
        q_HD, k_KD = (np.where(weights == 0, 1, weights) for weights in (self.norms.q_HD, self.norms.k_KD))
        return self.q_HDX / q_HD[:, :, None], self.k_KDX / k_KD[:, :, None]

    @property
    def heads_per_group(self) -> int:
        """Number of query heads that read each K/V head."""
        return len(self.q_HDX) // len(self.k_KDX)

    def groups(self, n_kv_heads: int) -> list["HeadMatrices"]:
        """Return the attention of each group of neighbouring heads that will share a K/V head, without norms."""
        q, k = len(self.q_HDX) // n_kv_heads, len(self.k_KDX) // n_kv_heads
        return [
            replace(
                self,
                norms=None,
                q_HDX=self.q_HDX[g * q : (g + 1) * q],
                k_KDX=self.k_KDX[g * k : (g + 1) * k],
                v_KDX=self.v_KDX[g * k : (g + 1) * k],
                o_HMD=self.o_HMD[g * q : (g + 1) * q],
            )
            for g in range(n_kv_heads)
        ]


def half_split_order(head_dim: int, n_rotary_pairs: int, pairing: Literal["half", "interleaved"]) -> NDArray[np.intp]:
    """Return a checkpoint's dimensions of a query or key head in the order of HeadMatrices.

    `pairing`: which dimensions the model rotates together (`PositionEncoding.rotary_pairing`).
    """
    order = np.arange(head_dim)
    if pairing == "interleaved":
        rotated = slice(0, 2 * n_rotary_pairs)
        order[rotated] = order[rotated].reshape(-1, 2).T.flatten()
    return order


def reduce_pairs(reduce: Callable[..., Real], values_HD: Real, n_rotary_pairs: int) -> Real:
    """Return the values with `reduce` (`np.mean`, `np.max`) of each RoPE pair in place of its two dimensions."""
    pairs_H2P = values_HD[:, : 2 * n_rotary_pairs].reshape(len(values_HD), 2, n_rotary_pairs)
    reduced_HD = values_HD.copy()
    reduced_HD[:, : 2 * n_rotary_pairs] = np.tile(reduce(pairs_H2P, axis=1), (1, 2))
    return reduced_HD


def pair_means(weights_HD: Real, n_rotary_pairs: int) -> Real:
    """Return weights that are equal for both dimensions of each RoPE pair: their means.

    A norm after rotation keeps logits a function of distance only with such weights.
    """
    return reduce_pairs(np.mean, weights_HD, n_rotary_pairs)
