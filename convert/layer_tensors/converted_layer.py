"""Describe the conversion of one layer, and hold its result."""

from dataclasses import dataclass
from typing import Protocol

from convert.recipe import Recipe
from model.attention_layout import Heads
from model.checkpoint import Array, Checkpoint


@dataclass(frozen=True)
class GroupReport:
    """Similarity of a group's heads, and the norm of their merged head relative to theirs."""

    norm_ratio: float
    """Norm of the merged head ÷ mean norm of the group's heads."""
    mean_cosine: float
    """Mean cosine between the heads of the group, over all pairs; 1 for a group of one."""


@dataclass(frozen=True)
class ConvertedLayer:
    """The layer's tensors by name, in their own dtypes, and a report for each group of K and V heads."""

    tensors: dict[str, Array]
    reports: dict[str, list[GroupReport]]
    clipped: tuple[int, int] = (0, 0)
    """How many queries, keys and values of the calibration text the model clips, and how many there are; zeros
    where they were not counted."""
    output_error: float | None = None
    """The squared error of its attention's output on the validation text ÷ the squared output of the original; None
    without a text, or if the original's output is 0."""


class LayerConversion(Protocol):
    """A request to compute the attention of one layer of the output."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def tensor_names(self) -> tuple[str, ...]:
        """All tensors of the output's layer."""
        ...

    @property
    def file(self) -> str:
        """The name of the layer's file in the calibration folder."""
        ...

    @property
    def reported_heads(self) -> tuple[Heads, ...]:
        """The heads that have a report."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's attention in float64."""
        ...

    def compute(self, checkpoint: Checkpoint) -> "ConvertedLayer":
        """Compute the layer by its weights alone."""
        ...
