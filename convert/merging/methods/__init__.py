"""The merge methods, one file each, imported when used.

Each of HEAD_METHODS is a pure function `merge(heads_HDM, rng)` that merges one group of heads into one head:

    heads_HDM   the group's K or V heads, [heads, head_dim, hidden]; for a bias, hidden = 1
    rng         the tensor's own random generator, for the methods that draw; groups use it in order
    returns     head_DM, [head_dim, hidden], in the same dtype

Each of LAYER_METHODS is a pure function `merge(moments)` of the moments of one group's heads. It returns linear maps of
these heads, of their queries and of the inputs of their output projection; see `convert.merging.moments`. Its file may
also define `alternatives(moments, maps, by_weights)`, which returns other solutions than `maps`, its own; `by_weights`
are the moments by the weights alone. Calibration keeps the solution with the least output error on validation windows.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads HEAD_METHODS for its help, without the time to import numpy
    from collections.abc import Callable

    import numpy as np

    from convert.merging.moments import Maps, Moments
    from model.checkpoint import Array

    HeadMethod = Callable[[Array, np.random.Generator], Array]
    LayerMethod = Callable[[Moments], Maps]
    Alternatives = Callable[[Moments, Maps, Moments], tuple[Maps, ...]]

RANDOM = "random"
# One module each in this folder.
HEAD_METHODS = ("mean", "first", RANDOM)
LAYER_METHODS = ("aligned", "pca", "fit")
CALIBRATED = ("fit",)
"""Layer methods that need a calibration text."""
REPEAT = "repeat"
"""Recorded as the method of a conversion to more heads, which repeats each head and merges none."""


def find_head_method(name: str) -> "HeadMethod":
    """Import the function of one of HEAD_METHODS."""
    merge: HeadMethod = import_module(f"convert.merging.methods.{name}").merge
    return merge


def find_layer_method(name: str) -> "LayerMethod":
    """Import the function of one of LAYER_METHODS."""
    merge: LayerMethod = import_module(f"convert.merging.methods.{name}").merge
    return merge


def find_alternatives(name: str) -> "Alternatives | None":
    """Import the function for other solutions of one of LAYER_METHODS; None if the method has one solution only."""
    alternatives: Alternatives | None = getattr(import_module(f"convert.merging.methods.{name}"), "alternatives", None)
    return alternatives
