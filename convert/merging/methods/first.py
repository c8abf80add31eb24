"""Keep the first head of each group and drop the others (the ablation of Ainslie et al. 2023, figure 4, "First")."""

import numpy as np

from model.checkpoint import Array


def merge(heads_HDM: Array, rng: np.random.Generator) -> Array:
    """Return a copy of the first head."""
    first_DM: Array = heads_HDM[0].copy()
    return first_DM
