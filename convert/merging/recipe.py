"""Describe one way to merge heads, with the text that it is calibrated on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.errors import UnsupportedMethodError
from convert.merging.methods import CALIBRATED, LAYER_METHODS, REPEAT

if TYPE_CHECKING:
    from convert.calibration_text.text import CalibrationText


@dataclass(frozen=True)
class Recipe:
    """One way to merge. `refit`, `refine` and `text` apply to LAYER_METHODS only."""

    method: str
    seed: int = 0
    refit: bool = False
    refine: int = 0
    """Tokens that each merged layer is trained on; 0 for none."""
    text: "CalibrationText | None" = None
    """The calibration text; None to merge by the weights alone."""
    device: str = "cpu"
    """The device that runs the model. It is not recorded, since it changes the rounding only."""

    @property
    def by_layer(self) -> bool:
        """Whether the method merges whole layers, and so changes queries and output projections too."""
        return self.method in LAYER_METHODS

    @property
    def method_name(self) -> str:
        """The method in the words of the command's option."""
        return self.method

    @property
    def record(self) -> dict[str, Any]:
        """The recipe's entries in `groupwise.json`: everything that the output depends on, rounding aside."""
        record: dict[str, Any] = {"method": self.method, "seed": self.seed}
        if self.method == REPEAT:
            return record
        return {
            **record, "refit": self.refit, "refine": self.refine,
            "calibration": self.text.record if self.text else None,
        }  # fmt: skip

    def check(self) -> None:
        """Raise UnsupportedMethodError if the choices are incompatible."""
        if self.method in CALIBRATED and self.text is None:
            raise UnsupportedMethodError(
                f"--method {self.method} needs a calibration text; of the weights alone: --method aligned or pca."
            )
        if self.refit and (self.text is None or not self.by_layer):
            raise UnsupportedMethodError(f"--refit needs a calibration text and one of {', '.join(LAYER_METHODS)}.")
        if self.refine and (self.text is None or not self.by_layer):
            raise UnsupportedMethodError(f"--refine needs a calibration text and one of {', '.join(LAYER_METHODS)}.")
