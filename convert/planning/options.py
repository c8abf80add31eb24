"""Hold the merge options of the command line."""

from dataclasses import dataclass

from convert.planning.recipe import GROUPINGS, NONE


@dataclass(frozen=True)
class MergeOptions:
    """The options of a merge. None: not set by the user."""

    method: str | None = None
    seed: int = 0
    renorm: str | None = None
    refit: bool = False
    refine: int = 0
    grouping: str = GROUPINGS[0]
    calibration: str | None = None
    """`none`, `shipped`, `self`, the path of a text, `hub:NAME…`, or several joined by +."""
    calibration_tokens: int | None = None

    @property
    def requests_calibration(self) -> bool:
        """Whether calibration was requested explicitly."""
        return self.calibration not in (None, NONE) or self.calibration_tokens is not None
