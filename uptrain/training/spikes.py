"""Detect spikes of the gradient norm. Their updates are left out (`--spike-sigma`)."""

from dataclasses import dataclass

import numpy as np

SPIKE_WINDOW = 128
"""How many norms a spike is compared with. Before there are as many, none is a spike."""


@dataclass
class SpikeDetector:
    """Compares gradient norms with those before them. Norms of the whole gradient give all ranks the same result."""

    sigma: float | None
    """How many standard deviations above the mean a norm is a spike; None: nothing is, and no norms are kept."""
    norms: list[float]
    """The last SPIKE_WINDOW norms, clamped to the limit that they had; `record` changes this list."""

    def limit(self) -> float:
        """Return the largest norm that is no spike."""
        if self.sigma is None or len(self.norms) < SPIKE_WINDOW:
            return np.inf
        return float(np.mean(self.norms) + self.sigma * np.std(self.norms))

    def record(self, norm: float) -> bool:
        """Record a finite norm; return whether it is a spike."""
        limit = self.limit()
        if self.sigma is not None:
            # Norms are clamped to the limit: one spike does not hide the next, and the limit follows a lasting rise.
            self.norms[:] = [*self.norms[-SPIKE_WINDOW + 1 :], min(norm, limit)]
        return norm > limit
