"""Initialise the new heads from scratch (the ablation of Ainslie et al. 2023, figure 4, "Random").

The paper does not give the scale. We draw from a normal distribution with the group's own root mean square, so that the
ablation loses what the heads have learned but not their size.
"""

import numpy as np

from convert.merging.rounding import round_once, widen
from model.checkpoint import Array


def merge(heads_HDM: Array, n_kv_heads: int, rng: np.random.Generator) -> Array:
    merged_GDM = np.empty((n_kv_heads, *heads_HDM.shape[1:]), heads_HDM.dtype)
    groups_GKDM = heads_HDM.reshape(n_kv_heads, -1, *heads_HDM.shape[1:])
    for group_KDM, merged_DM in zip(groups_GKDM, merged_GDM, strict=True):
        mean_square = np.mean([np.square(widen(head_DM), dtype=np.float64).mean() for head_DM in group_KDM])
        merged_DM[...] = round_once(rng.standard_normal(merged_DM.shape) * np.sqrt(mean_square), heads_HDM.dtype)
    return merged_GDM
