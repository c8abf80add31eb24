"""Everything a user chooses about how heads are merged."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.merging.methods import AUTO, CALIBRATED, LAYER_METHODS, REPEAT
from model.common.errors import CheckpointError

if TYPE_CHECKING:
    from convert.calibration.text import CalibrationText

NONE = "none"
MAX_TOKENS = 1 << 24
"""Tokens of calibration text, and of refining, at most."""
GROUPINGS = ("contiguous", "similar")
RENORMS = ("none", "norm", "spread")


class UnsupportedMethodError(CheckpointError):
    """A way to merge that this checkpoint, or what is installed, does not allow; another may be."""


@dataclass(frozen=True)
class Recipe:
    """One way to merge. `mean`, `first`, `random` and `repeat` know no more than a seed."""

    method: str
    seed: int = 0
    renorm: str = "none"
    refit: bool = False
    refine: int = 0
    """Tokens that each merged layer is trained on."""
    grouping: str = "contiguous"
    sample: "CalibrationText | None" = None
    """The text that layers are calibrated on; None for the weights alone."""

    @property
    def by_layer(self) -> bool:
        """Whether queries and output projections change with the K/V heads."""
        return self.method in (*LAYER_METHODS, AUTO)

    @property
    def record(self) -> dict[str, Any]:
        """What is written of it: all that the output depends on."""
        found: dict[str, Any] = {"method": self.method, "seed": self.seed}
        if self.method == REPEAT:
            return found
        sample = self.sample.record if self.sample else None
        return {
            **found, "renorm": self.renorm, "refit": self.refit, "refine": self.refine, "grouping": self.grouping,
            "calibration": sample,
        }  # fmt: skip

    def check(self) -> None:
        """Raise UnsupportedMethodError where the choices do not go together."""
        if self.method in (*CALIBRATED, AUTO) and self.sample is None:
            raise UnsupportedMethodError(
                f"--method {self.method} needs a calibration text; of the weights alone: --method aligned or pca."
            )
        if self.refit and (self.sample is None or not self.by_layer):
            raise UnsupportedMethodError(f"--refit needs a calibration text and one of {', '.join(LAYER_METHODS)}.")
        if self.refine and (self.sample is None or self.method not in LAYER_METHODS):
            raise UnsupportedMethodError(f"--refine needs a calibration text and one of {', '.join(LAYER_METHODS)}.")
        if self.grouping == "similar" and not self.by_layer:
            raise UnsupportedMethodError(
                f"--group-heads similar moves queries, which --method {self.method} leaves as they are; choose one of "
                f"{', '.join(LAYER_METHODS)}."
            )
        if self.renorm == "spread" and not self.by_layer:
            raise UnsupportedMethodError(
                f"--renorm spread scales queries, which --method {self.method} leaves as they are; choose one of "
                f"{', '.join(LAYER_METHODS)}, or --renorm norm."
            )
