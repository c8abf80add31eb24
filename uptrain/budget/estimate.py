"""Estimate memory and time by formulas, which are part of the output. Actual values may be 50 % higher."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from model.checkpoint import Tensor
from model.geometry import Geometry

STATE_BYTES = 16
"""Bytes of a trained parameter: float32 weight, gradient and two AdamW moments."""
LOADED_BYTES = 4
"""Bytes of a loaded float32 parameter, before it moves to its device or shard."""
COMPUTE_BYTES = 2
"""Bytes of an activation or a teacher's parameter in bfloat16."""
MFU = 0.40
"""Model FLOPs utilisation; public runs of dense models of 1 to 13 B parameters report 0.33 to 0.46."""
PEAK_FLOPS = {"H100": 989e12, "A100": 312e12}
"""Peak FLOP/s in bfloat16 without sparsity (NVIDIA's data sheets of the SXM cards)."""

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
    """Quantities that the estimates depend on."""

    n_params: int
    n_teacher_params: int
    """0 without a teacher."""
    activations_per_token: int
    """Values per token that all layers keep for the backward pass."""
    processes: int


def count_parameters(tensors: Iterable[Tensor]) -> int:
    """Return the number of parameters, without the RoPE frequencies that old checkpoints store."""
    return sum(prod(tensor.shape) for tensor in tensors if not tensor.name.endswith("rotary_emb.inv_freq"))


def activations_per_token(geometry: Geometry, intermediate_size: int) -> int:
    """Return the number of values per token kept for the backward pass, for attention without a score matrix.

    A layer keeps inputs and outputs of its two norms, queries, keys, values, the attention output, and SwiGLU's gate,
    up, activation and product.
    """
    query, kv = geometry.n_heads * geometry.head_dim, geometry.n_kv_heads * geometry.head_dim
    return geometry.n_layers * (4 * geometry.hidden_size + 2 * query + 2 * kv + 4 * intermediate_size)


def memory(work: Workload, micro_batch_tokens: int) -> dict[str, Any]:
    """Return bytes per device for replicas (DDP) and shards (FSDP2), and bytes of the host while models are loaded."""
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
