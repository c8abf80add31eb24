"""Mean pooling, the paper's method (Ainslie et al. 2023, section 2.1): each new head is the mean of its group."""

import numpy as np

from convert.merging.rounding import round_once, widen
from model.checkpoint import Array

_BLOCK = 1 << 17  # elements summed at a time, so that the float64 sums stay in the processor's cache


def merge(heads_HDM: Array, n_kv_heads: int, rng: np.random.Generator) -> Array:
    """Average the heads of each group in float64, and round once to their dtype."""
    groups_GKF = heads_HDM.reshape(n_kv_heads, len(heads_HDM) // n_kv_heads, -1)  # F: a head's numbers in a row
    n_heads, size = groups_GKF.shape[1:]
    merged_GF = np.empty((n_kv_heads, size), heads_HDM.dtype)
    for group_KF, merged_F in zip(groups_GKF, merged_GF, strict=True):
        for start in range(0, size, _BLOCK):
            block = slice(start, start + _BLOCK)
            total = widen(group_KF[0, block]).astype(np.float64)
            for head_F in group_KF[1:]:
                total += widen(head_F[block])
            total /= n_heads
            merged_F[block] = round_once(total, heads_HDM.dtype)
    return merged_GF.reshape(n_kv_heads, *heads_HDM.shape[1:])
