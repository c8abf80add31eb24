"""Mean pooling, the paper's method (Ainslie et al. 2023, section 2.1): each new head is the mean of its group."""

import numpy as np

from convert.layer_tensors.rounding import round_once, widen
from model.checkpoint import Array

_BLOCK = 1 << 17  # elements summed at a time, so that the float64 sums stay in the processor's cache


def merge(heads_HDM: Array, rng: np.random.Generator) -> Array:
    """Average the heads in float64, and round once to their dtype."""
    heads_HF = heads_HDM.reshape(len(heads_HDM), -1)  # F: a head's elements in a row
    n_heads, size = heads_HF.shape
    merged_F = np.empty(size, heads_HDM.dtype)
    for start in range(0, size, _BLOCK):
        block = slice(start, start + _BLOCK)
        total = widen(heads_HF[0, block]).astype(np.float64)
        for head_F in heads_HF[1:]:
            total += widen(head_F[block])
        total /= n_heads
        merged_F[block] = round_once(total, heads_HDM.dtype)
    return merged_F.reshape(heads_HDM.shape[1:])
