"""The merge methods, one file each, imported when used.

Of METHODS each is a pure function of one tensor's heads, `merge(heads_HDM, n_kv_heads, rng)`:

    heads_HDM   the source's K or V heads, [n_kv_heads_in, head_dim, hidden]; a bias's have hidden = 1
    n_kv_heads  how many to make; divides n_kv_heads_in. Neighbours share a group, as grouped-query attention reads them
    rng         the tensor's own random generator, for the methods that draw
    returns     [n_kv_heads, head_dim, hidden] in the same dtype

Calling it group by group, in order and with the same `rng`, gives the same as calling it once.

Of LAYER_METHODS each is a pure function `merge(moments)` of what is known of one group's heads, and returns linear maps
of them, of its queries and of what its output projection reads; see `convert.merging.moments`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads METHODS for its help, and must not wait for numpy
    from collections.abc import Callable

    import numpy as np

    from convert.merging.moments import Maps, Moments
    from model.checkpoint import Array

    Merge = Callable[[Array, int, np.random.Generator], Array]
    MergeGroup = Callable[[Moments], Maps]

# One module each in this folder.
METHODS = ("mean", "first", "random")
LAYER_METHODS = ("aligned", "pca", "fit")
CALIBRATED = ("fit",)
"""Those of them that mean nothing on weights alone."""
AUTO = "auto"
"""What stands for the method that does best on a part of the calibration text."""
REPEAT = "repeat"
"""What a conversion to more heads says instead of a method: each head stands there several times, nothing is merged."""


def find_method(name: str) -> "Merge":
    merge: Merge = import_module(f"convert.merging.methods.{name}").merge
    return merge


def find_group_method(name: str) -> "MergeGroup":
    merge: MergeGroup = import_module(f"convert.merging.methods.{name}").merge
    return merge
