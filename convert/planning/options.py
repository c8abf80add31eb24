"""Hold the merge options of the command line."""

from dataclasses import dataclass

from convert.planning.recipe import NONE
from model.common.command_options import AUTO_DEVICE


@dataclass(frozen=True)
class MergeOptions:
    """The options of a merge. None: not set by the user."""

    method: str | None = None
    seed: int = 0
    refit: bool = False
    refine: int | None = None
    calibration: str | None = None
    """`none`, `shipped`, `self`, the path of a text, `hub:NAME…`, or several joined by +."""
    calibration_tokens: int | None = None
    device: str = AUTO_DEVICE

    @property
    def of_calibration(self) -> str | None:
        """An option that was given and needs a calibration text."""
        given = {
            "--calibration": self.calibration not in (None, NONE),
            "--calibration-tokens": self.calibration_tokens is not None,
            "--device": self.device != AUTO_DEVICE,
        }
        return next((option for option, is_given in given.items() if is_given), None)
