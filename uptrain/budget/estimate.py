"""Estimate memory and time by formulas, which are part of the output. Actual values may be 50 % higher."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from model.checkpoint import Tensor
from model.checkpoint.tensor import BITS
from model.geometry import ModelSizes
from uptrain.training.parts import common_dtype

MASTER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 4, 8
"""Bytes of a trained parameter: float32 weight, gradient and two AdamW moments."""
COMPUTE_BYTES = 2
"""Bytes in bfloat16: of an activation, a teacher's parameter, and the copy of a trained one in the computation."""
MFU = 0.40
"""Model FLOPs utilisation; public runs of dense models of 1 to 13 B parameters report 0.33 to 0.46."""
PEAK_FLOPS = {"H100": 989e12, "A100": 312e12}
"""Peak FLOP/s in bfloat16 without sparsity (NVIDIA's data sheets of the SXM cards)."""
MIN_CHUNK_LOGITS = 1 << 23
"""As in `model.decoder.losses`, which needs torch."""
LOGIT_BYTES, TEACHER_LOGIT_BYTES = 6, 10
"""Bytes of a logit of a chunk, in bfloat16 and float32; with a teacher also its logits, and the log ratio."""

MEMORY_FORMULA = (
    "16 bytes x trained parameters (float32 weight, gradient and AdamW's two moments) + 2 (their bfloat16 copies; not "
    "sharded) + the frozen parameters in the model's dtype + 2 bytes x the teacher's parameters (all / devices where "
    "sharded; in replicas without those that equal frozen ones) + activations of the micro-batch (nothing recomputed) "
    "+ a chunk of the head's logits. Not counted: buffers, and layers that FSDP2 gathers."
)
TIME_FORMULA = (
    f"(6 x parameters + 2 x teacher's parameters) x tokens / ({MFU:.2f} x peak FLOP/s). Not counted: attention's "
    "products with length, evaluation, saving."
)


@dataclass(frozen=True)
class Workload:
    """Quantities that the estimate of time depends on."""

    n_params: int
    n_teacher_params: int
    """0 without a teacher."""
    processes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one device that holds everything, for one choice of `--trainable`."""

    frozen: int
    """Parameters that are not trained, in the model's dtype."""
    masters: int
    copies: int
    """bfloat16 copies of the trained parameters."""
    gradients: int
    optimizer: int
    teacher: int
    shared: int
    """The part of `teacher` that replicas do not hold, because it equals frozen parameters."""
    activations: int
    logits: int

    def replicated(self) -> int:
        """Return the bytes of a device on its own, or with DDP."""
        states = self.frozen + self.masters + self.copies + self.gradients + self.optimizer
        return states + self.teacher - self.shared + self.activations + self.logits

    def sharded(self, devices: int) -> int:
        """Return the bytes of each device with FSDP2."""
        states = self.frozen + self.masters + self.gradients + self.optimizer + self.teacher
        return -(-states // devices) + self.activations + self.logits

    def host(self) -> int:
        """Return the bytes of the host while models are read: in each process, or once if sharded."""
        return self.frozen + self.masters + self.teacher - self.shared


def count_parameters(tensors: Iterable[Tensor]) -> int:
    """Return the number of parameters, without the RoPE frequencies that old checkpoints store."""
    return sum(prod(tensor.shape) for tensor in tensors if not _is_rope(tensor))


def _is_rope(tensor: Tensor) -> bool:
    return tensor.name.endswith("rotary_emb.inv_freq")


def memory(
    tensors: Iterable[Tensor],
    teacher: Iterable[Tensor],
    sizes: ModelSizes,
    intermediate_size: int,
    part: str,
    trained: re.Pattern[str],
    micro_batch_tokens: int,
) -> Memory:
    """Return the memory of training the parameters that match `trained`, the part of that name.

    Tensors of the teacher count as shared if a frozen one has their name, dtype and shape, as after a conversion.
    """
    parameters = [tensor for tensor in tensors if not _is_rope(tensor)]
    frozen = [tensor for tensor in parameters if not trained.search(tensor.name)]
    n_trained = count_parameters(parameters) - count_parameters(frozen)
    taught = list(teacher)
    activations = activation_bytes(sizes, intermediate_size, part) * micro_batch_tokens
    chunk = max(MIN_CHUNK_LOGITS, micro_batch_tokens * sizes.hidden_size)
    return Memory(
        frozen=count_parameters(frozen) * BITS[common_dtype(parameters)] // 8,
        masters=MASTER_BYTES * n_trained,
        copies=COMPUTE_BYTES * n_trained,
        gradients=GRADIENT_BYTES * n_trained,
        optimizer=OPTIMIZER_BYTES * n_trained,
        teacher=COMPUTE_BYTES * count_parameters(taught),
        shared=COMPUTE_BYTES * count_parameters(set(taught) & set(frozen)),
        activations=activations,
        logits=chunk * (LOGIT_BYTES + (TEACHER_LOGIT_BYTES if taught else 0)),
    )


def activation_bytes(sizes: ModelSizes, intermediate_size: int, part: str) -> int:
    """Return the bytes per token kept for the backward pass, for attention without a score matrix.

    A layer keeps the float32 inputs of its two norms; queries, keys, values, the attention output, and SwiGLU's gate,
    activation and up in bfloat16. A trained projection also keeps its input, and a trained norm its float32 result
    before the weight.
    """
    hidden, query = sizes.hidden_size, sizes.n_heads * sizes.head_dim
    kv = sizes.n_kv_heads * sizes.head_dim
    layer = 2 * 4 * hidden + 2 * (2 * query + 2 * kv + 3 * intermediate_size)
    layer += 2 * hidden  # the input of keys and values
    if part != "kv":
        layer += 4 * hidden
    if part == "all":
        layer += 4 * hidden + 2 * hidden + 2 * intermediate_size
    return sizes.n_layers * layer


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
