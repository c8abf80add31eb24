"""Estimate the time of a run by a formula, which `plan --json` prints. The actual time may be 50 % longer."""

from typing import Any

from uptrain.estimates.memory import MemoryEstimator
from uptrain.estimates.parameter_counts import count_lm_head, count_multiplied, without_buffers

MFU = 0.40
"""Model FLOPs utilisation; public runs of dense models of 1 to 13 B parameters report 0.33 to 0.46."""
PEAK_FLOPS = {"H100": 989e12, "A100": 312e12}
"""Peak FLOP/s in bfloat16 without sparsity (NVIDIA's data sheets of the SXM cards)."""
TIME_FORMULA = (
    "(4 x parameters + 2 x trained parameters + 2 x teacher's parameters) x tokens / "
    f"({MFU:.2f} x peak FLOP/s). Not counted: embeddings that are only looked up, experts that a token does not use, "
    "the attention scores, whose cost grows with the window, recomputing, evaluation, saving."
)
"""A product takes 2 operations for each parameter and token in the forward pass, as many for the gradient of its input,
and, if the parameter is trained, as many for its own."""


def flops_per_token(n_params: int, n_trained: int, n_teacher: int) -> int:
    """Return the floating-point operations of training on one token.

    The numbers are those of parameters that a token is multiplied by (`count_multiplied`); `n_teacher` is 0 without a
    teacher.
    """
    return 4 * n_params + 2 * n_trained + 2 * n_teacher


def flops_per_token_of(estimator: MemoryEstimator, trainable: str) -> int:
    """Return the floating-point operations of training a part on one token. The model must have the part."""
    read = (estimator.tensors, estimator.trained(trainable), estimator.teacher_tensors)
    return flops_per_token(*(count_multiplied(tensors, estimator.config) for tensors in read))


def recomputing_share(estimator: MemoryEstimator, trainable: str) -> float:
    """Return the operations of `--activation-checkpointing`, as a share of the others: the layers' forward pass."""
    lm_head = count_lm_head(without_buffers(estimator.tensors))
    in_layers = count_multiplied(estimator.tensors, estimator.config) - lm_head
    return 2 * in_layers / flops_per_token_of(estimator, trainable)


def estimate_time(flops: int, processes: int, share: float) -> dict[str, Any]:
    """Return the operations, and the hours that they take on the devices of PEAK_FLOPS.

    `share`: see `recomputing_share`.
    """
    device_hours = {name: flops / (MFU * peak) / 3600 for name, peak in PEAK_FLOPS.items()}
    return {
        "flops": flops,
        "device_hours": device_hours,
        "hours": {name: hours / processes for name, hours in device_hours.items()},
        "recomputing_share": share,
    }
