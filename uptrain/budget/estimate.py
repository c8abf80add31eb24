"""Memory and time before anything runs: formulas, with what they leave out. Half as much again is no surprise."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from model.checkpoint import Tensor
from model.geometry import Geometry

STATE_BYTES = 16
"""A trained parameter: float32 weight, gradient and two AdamW moments."""
LOADED_BYTES = 4
"""A parameter as it is read, in float32, before it goes to its device or shard."""
COMPUTE_BYTES = 2
"""An activation, or a teacher's parameter: bfloat16."""
MFU = 0.40
"""Share of the peak that training reaches; public runs of dense models of 1 to 13 B parameters report 0.33 to 0.46."""
PEAK_FLOPS = {"H100": 989e12, "A100": 312e12}
"""bfloat16 without sparsity, a second (NVIDIA's data sheets of the SXM cards)."""

MEMORY_FORMULA = (
    "16 bytes x parameters (float32 weight, gradient and AdamW's two moments) + 2 bytes x teacher's parameters "
    "(both / processes where sharded) + 2 bytes x layers x (4 hidden + 2 query + 2 K/V + 4 intermediate) x tokens of "
    "the micro-batch (activations, nothing recomputed). Not counted: buffers, and the head's chunks."
)
TIME_FORMULA = (
    f"(6 x parameters + 2 x teacher's parameters) x tokens / ({MFU:.2f} x peak FLOP/s). Not counted: attention's "
    "products with length, evaluation, saving."
)


@dataclass(frozen=True)
class Workload:
    """What the estimates depend on."""

    n_params: int
    n_teacher_params: int
    """0 without a teacher."""
    activations_per_token: int
    """Values kept for the backward pass, all layers."""
    processes: int


def count_parameters(tensors: Iterable[Tensor]) -> int:
    """Return the number of weights; RoPE frequencies, which old checkpoints store, are none."""
    return sum(prod(tensor.shape) for tensor in tensors if not tensor.name.endswith("rotary_emb.inv_freq"))


def activations_per_token(geometry: Geometry, intermediate_size: int) -> int:
    """Return how many values of a token are kept for the backward pass by attention without a score matrix.

    A layer keeps what its two norms read and give, queries, keys, values, attention's output, and SwiGLU's gate, up,
    activation and product.
    """
    query, kv = geometry.n_heads * geometry.head_dim, geometry.n_kv_heads * geometry.head_dim
    return geometry.n_layers * (4 * geometry.hidden_size + 2 * query + 2 * kv + 4 * intermediate_size)


def memory(work: Workload, micro_batch_tokens: int) -> dict[str, Any]:
    """Return bytes of one device for replicas (DDP) and for shards (FSDP2), and of the host while models are read."""
    states = STATE_BYTES * work.n_params + COMPUTE_BYTES * work.n_teacher_params
    activations = COMPUTE_BYTES * work.activations_per_token * micro_batch_tokens
    return {
        "replicated_bytes_per_process": states + activations,
        "sharded_bytes_per_process": -(-states // work.processes) + activations,
        "activation_bytes": activations,
        "host_bytes": LOADED_BYTES * work.n_params + COMPUTE_BYTES * work.n_teacher_params,
        "micro_batch_tokens": micro_batch_tokens,
        "formula": MEMORY_FORMULA,
    }


def time(work: Workload, tokens: int) -> dict[str, Any]:
    """Return floating-point operations, and hours on devices of which a peak is known."""
    flops = (6 * work.n_params + 2 * work.n_teacher_params) * tokens
    device_hours = {name: flops / (MFU * peak) / 3600 for name, peak in PEAK_FLOPS.items()}
    return {
        "flops": flops,
        "device_hours": device_hours,
        "hours": {name: hours / work.processes for name, hours in device_hours.items()},
        "mfu": MFU,
        "formula": TIME_FORMULA,
    }
