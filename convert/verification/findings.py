"""Hold the results of a verification."""

from dataclasses import dataclass, field


@dataclass
class Findings:
    """Counts of the compared parts, and every difference, in words."""

    n_regrouped: int = 0
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
