"""Observe how much of a layer's heads the class clips (`clip_qkv` of OLMo and MPT).

The letters are those of `runnable_layer`.
"""

import torch
from torch import Tensor

from convert.merging.clipping import HeadMaxima
from model.common.errors import CheckpointError
from model.decoder.devices import to_float64

_MAX_CLIPPED = 1e-2
"""Maximum relative change of queries, keys or values by the clip: a merge treats them as linear in their inputs."""


class ClippedHeads:
    """How much of a layer's queries, keys and values is clipped, summed over batches."""

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self.n_clipped, self.n_values = 0, 0
        """Numbers beyond the clip, and all numbers."""
        self._largest: list[Tensor] = []
        self._clipped_power, self._power = [0.0] * 3, [0.0] * 3

    def add(self, heads: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add a batch of queries, keys and values, [B, T, heads, D]."""
        largest = [heads_BTHD.abs().amax(dim=(0, 1)) for heads_BTHD in heads]
        known = self._largest or largest
        self._largest = [torch.maximum(*pair) for pair in zip(known, largest, strict=True)]
        for i, heads_BTHD in enumerate(heads):
            beyond_BTHD = (heads_BTHD.abs() - self.clip).clamp(min=0)
            self.n_clipped += int(beyond_BTHD.count_nonzero())
            self.n_values += beyond_BTHD.numel()
            self._clipped_power[i] += float(to_float64(beyond_BTHD).square().sum())
            self._power[i] += float(to_float64(heads_BTHD).square().sum())

    @property
    def largest(self) -> HeadMaxima:
        """The largest absolute values by dimension."""
        return HeadMaxima(*(each_HD.cpu().double().numpy() for each_HD in self._largest))

    def check(self, index: int, where: str) -> None:
        """Raise CheckpointError if the clip changes the heads of layer `index` too much for a merge."""
        counts = f"{self.n_clipped:,} of {self.n_values:,}"
        powers = zip(self._clipped_power, self._power, strict=True)
        if any(clipped > _MAX_CLIPPED**2 * power for clipped, power in powers):
            raise CheckpointError(
                f"layer {index}: clip_qkv = {self.clip:g} clips {counts} queries, keys and values {where}, which a "
                "merge by linear maps cannot follow; use --method mean."
            )
