"""Keep the first head of each group and drop the others (the ablation of Ainslie et al. 2023, figure 4, "First")."""

import numpy as np

from model.checkpoint import Array


def merge(heads_HDM: Array, n_kv_heads: int, rng: np.random.Generator) -> Array:
    return heads_HDM[:: len(heads_HDM) // n_kv_heads].copy()
