"""Describe one way to merge heads."""

from dataclasses import dataclass
from typing import Any

from convert.errors import UnsupportedMethodError
from convert.merging.methods import CALIBRATED, LAYER_METHODS, RANDOM, REPEAT
from convert.recipe import Recipe


@dataclass(frozen=True)
class MergeRecipe(Recipe):
    """One way to merge. `refit`, `refine` and `text` apply to LAYER_METHODS only."""

    @property
    def by_layer(self) -> bool:
        """Whether the method merges whole layers, and so changes queries and output projections too."""
        return self.method in LAYER_METHODS

    @property
    def uses_seed(self) -> bool:
        return self.method == RANDOM or super().uses_seed

    @property
    def record(self) -> dict[str, Any]:
        record = super().record
        return {"method": record["method"], "seed": record["seed"]} if self.method == REPEAT else record

    def check(self) -> None:
        """Raise UnsupportedMethodError if the choices are incompatible."""
        if self.method in CALIBRATED and self.text is None:
            raise UnsupportedMethodError(
                f"--method {self.method} needs a calibration text; of the weights alone: --method aligned or pca."
            )
        for option, given in (("--refit", self.refit), ("--refine", self.refine)):
            if given and (self.text is None or not self.by_layer):
                raise UnsupportedMethodError(
                    f"{option} needs a calibration text and one of {', '.join(LAYER_METHODS)}."
                )
