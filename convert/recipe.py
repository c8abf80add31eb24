"""Describe one way to convert, with the text that it is calibrated on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.calibration_text.choices import SELF

if TYPE_CHECKING:
    from convert.calibration_text.text import CalibrationText


@dataclass(frozen=True)
class Recipe:
    """What all conversions have. Its kinds are `MergeRecipe` and `LatentRecipe`."""

    method: str
    seed: int = 0
    refit: bool = False
    refine: int = 0
    """Tokens that each converted layer is trained on; 0 for none."""
    text: "CalibrationText | None" = None
    """The calibration text; None to convert by the weights alone."""
    device: str = "cpu"
    """The device that runs the model. It is not recorded, since it changes the rounding only."""

    @property
    def method_name(self) -> str:
        """The method in the words of the command's option."""
        return self.method

    @property
    def uses_seed(self) -> bool:
        """Whether the output depends on the seed."""
        return self.refine > 0 or (self.text is not None and SELF in self.text.parts)

    @property
    def record(self) -> dict[str, Any]:
        """The recipe's entries in `groupwise.json`: everything that the output depends on, rounding aside."""
        return {
            "method": self.method, "seed": self.seed if self.uses_seed else 0,
            "refit": self.refit, "refine": self.refine,
            "calibration": self.text.record if self.text else None,
        }  # fmt: skip
