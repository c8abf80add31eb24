"""What training minimises, one file each with

    loss_sum(student, teacher, batch) -> Tensor

the loss summed over the batch's targets, in float32; the loop divides by the number of targets of all processes.
"""

import importlib
from collections.abc import Callable
from typing import cast

from torch import Tensor

LOSSES = ("next-token", "distill", "mix")
NEEDS_TEACHER = ("distill", "mix")


def find_loss(name: str) -> Callable[..., Tensor]:
    """Return the function `loss_sum` of a loss."""
    module = importlib.import_module(f"uptrain.losses.{name.replace('-', '_')}")
    return cast("Callable[..., Tensor]", module.loss_sum)
