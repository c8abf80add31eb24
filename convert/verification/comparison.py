"""Hold what a verification compares, and what it finds."""

from dataclasses import dataclass, field
from typing import Any

from convert.layer_tensors.converted_layer import GroupReport
from convert.planning.plan import Plan
from model.checkpoint import Checkpoint


@dataclass
class Findings:
    """Counts of the compared parts, and every difference, in words."""

    n_computed: int = 0
    n_copied: int = 0
    n_files: int = 0
    rounded: dict[str, float] = field(default_factory=dict)
    """Merged tensors that differ within the tolerance, as another processor or number of threads may cause: the error
    relative to the tensor's norm."""
    unchecked: list[str] = field(default_factory=list)
    """Parts that could not be compared, each with the reason."""
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if everything was compared and agrees."""
        return not self.differences and not self.unchecked

    @property
    def record(self) -> dict[str, Any]:
        """The content of `convert verify --json`."""
        return {
            "ok": self.ok,
            "n_computed": self.n_computed,
            "n_copied": self.n_copied,
            "n_files": self.n_files,
            "rounded": self.rounded,
            "unchecked": self.unchecked,
            "differences": self.differences,
        }


@dataclass(frozen=True)
class Comparison:
    """A converted folder, and the conversion of its source that it is compared with."""

    source: Checkpoint
    out: Checkpoint
    plan: Plan
    """The plan of the conversion that OUT records."""
    record: dict[str, Any]
    """The content of OUT's `groupwise.json`."""
    findings: Findings
    """The results so far."""
    reports: dict[str, list[GroupReport]] = field(default_factory=dict)
    """Of heads that were recomputed and agree in every byte: the report on each group, by `Heads.label`."""
    layer_errors: list[dict[str, Any]] = field(default_factory=list)
    """Of layers that the calibration has recomputed: `layer_errors`, as `groupwise.json` holds them."""
