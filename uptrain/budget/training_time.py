"""Estimate the time of a run by a formula, which is part of the output. The actual time may be 50 % longer."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from model.checkpoint import Tensor

MFU = 0.40
"""Model FLOPs utilisation; public runs of dense models of 1 to 13 B parameters report 0.33 to 0.46."""
PEAK_FLOPS = {"H100": 989e12, "A100": 312e12}
"""Peak FLOP/s in bfloat16 without sparsity (NVIDIA's data sheets of the SXM cards)."""
TIME_FORMULA = (
    f"(6 x parameters + 2 x teacher's parameters) x tokens / ({MFU:.2f} x peak FLOP/s). Not counted: attention's "
    "products with length, evaluation, saving. Training attention alone takes about a fifth less."
)


@dataclass(frozen=True)
class Workload:
    """Quantities that the estimate of time depends on."""

    n_params: int
    n_teacher_params: int
    """0 without a teacher."""
    processes: int


def count_parameters(tensors: Iterable[Tensor]) -> int:
    """Return the number of parameters, without the RoPE frequencies that old checkpoints store."""
    return sum(prod(tensor.shape) for tensor in tensors if not is_rope(tensor))


def is_rope(tensor: Tensor) -> bool:
    """Return whether a tensor is the RoPE frequencies that old checkpoints store."""
    return tensor.name.endswith("rotary_emb.inv_freq")


def time(work: Workload, tokens: int) -> dict[str, Any]:
    """Return floating-point operations, and hours on the devices of PEAK_FLOPS."""
    flops = (6 * work.n_params + 2 * work.n_teacher_params) * tokens
    device_hours = {name: flops / (MFU * peak) / 3600 for name, peak in PEAK_FLOPS.items()}
    return {
        "flops": flops,
        "device_hours": device_hours,
        "hours": {name: hours / work.processes for name, hours in device_hours.items()},
        "mfu": MFU,
        "formula": TIME_FORMULA,
    }
