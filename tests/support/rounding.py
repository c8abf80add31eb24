"""How far equal computations may differ on this processor."""

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN, ROWS = 128, (16, 24, 32, 48, 64, 96, 128, 192)
"""Sizes of the tests' models."""


def _depends_on_rows() -> bool:
    """Return whether some rows of a product have other bits if the matrix has fewer rows: MKL does so with AVX2."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (51, max(ROWS)))
    whole = F.linear(x, weight)
    return not all(torch.equal(F.linear(x, weight[:n]), whole[:, :n]) for n in ROWS)


ROUNDING = 2e-6 if _depends_on_rows() else 0.0
"""Limit of the difference between logits with repeated K/V heads and with one for several query heads."""


def assert_close(ours: Tensor, theirs: Tensor, limit: float = 1e-5) -> None:
    """Check that the norm of a difference is at most a share of the norm."""
    assert float((ours - theirs).norm()) <= limit * float(theirs.norm())
