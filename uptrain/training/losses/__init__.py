"""Training losses, one per file; `kl` and `top_k_kl` hold what several need.

The module of a loss defines

    loss_sum(student, teacher, batch) -> Tensor

which returns the loss summed over the batch's targets, in float32. The loop divides it by the number of targets of all
processes.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from model.common.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

LOSSES = {
    "next-token": "next-token cross-entropy",
    "distill": "KL divergence from the teacher",
    "mix": "half cross-entropy, half KL divergence",
}
"""Names of the losses and their descriptions."""
WITHOUT_TEACHER = "next-token"


def find_loss(name: str) -> "Callable[..., Tensor]":
    """Return the function `loss_sum` of a loss. Raises InputError for a name that is not in LOSSES."""
    if name not in LOSSES:
        raise InputError(f"the loss {name!r} is unknown; choose one of {', '.join(LOSSES)}.")
    module = importlib.import_module(f"uptrain.training.losses.{name.replace('-', '_')}")
    return cast("Callable[..., Tensor]", module.loss_sum)
