"""Initialise the new heads from scratch (the ablation of Ainslie et al. 2023, figure 4, "Random").

The paper does not give the scale. We draw from a normal distribution with the root mean square of the group, so that
the ablation discards the learned values but keeps their scale.
"""

import numpy as np

from convert.layer_tensors.rounding import round_once, widen
from model.checkpoint import Array


def merge(heads_HDM: Array, rng: np.random.Generator) -> Array:
    """Return a random head with the root mean square of the group's heads."""
    mean_square = np.mean([np.square(widen(head_DM), dtype=np.float64).mean() for head_DM in heads_HDM])
    return round_once(rng.standard_normal(heads_HDM.shape[1:]) * np.sqrt(mean_square), heads_HDM.dtype)
