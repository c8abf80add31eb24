"""The first step of training a part of a model, in memory, against that of full training."""

import re
from pathlib import Path

import pytest
import torch

from uptrain.models.load import load_student


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids that every tiny model knows, targets and document numbers, each (2, 16): two documents a window."""
    ids = torch.randint(0, 67, (2, 16), generator=torch.Generator().manual_seed(0))
    return ids, ids, (torch.arange(16) > 9).long().expand(2, -1)


def assert_first_step_is_of_full_training(folder: Path, part: str, names: re.Pattern[str], autocast: bool) -> None:
    """Check the loss, which parameters have a gradient (those with `names`), and that each is the full one."""
    losses, gradients = [], []
    for each in ("all", part):
        student = load_student(folder, each).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = student(*batch())
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad for n, p in student.named_parameters() if p.grad is not None})
    full, partial = gradients
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert {name for name in full if names.search(name)} == partial.keys()
    for name, gradient in partial.items():
        assert (gradient - full[name]).norm() <= 1e-6 * full[name].norm(), name
