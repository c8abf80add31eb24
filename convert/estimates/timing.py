"""Time parts of a calibration, and estimate what merges and latent attention share."""

import time
from collections.abc import Callable
from math import prod

import numpy as np
import torch

from convert.planning.plan import Plan

_MAX_RUNS, _MAX_SECONDS = 3, 0.2
"""Number of runs, of which the fastest counts, and the seconds after which no further one begins."""
_MATRIX_SIZE = 512
FORWARDS_PER_TRAINED_TOKEN = 3
"""Cost of training on a token, in forward passes."""
_GENERATION_EFFICIENCY = 0.5
"""Speed of generating text as a share of a layer's speed."""
_COPIED_BYTES = 1 << 27
"""Size of the tensor whose copy measures the speed of memory, more than caches hold."""


def fastest_seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Return the seconds of the fastest of several runs on a device. The first one also fills caches."""
    seconds: list[float] = []
    while len(seconds) < _MAX_RUNS and sum(seconds) < _MAX_SECONDS:
        started = time.perf_counter()
        work()
        float(torch.ones((), device=device))  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def matmul_flops_per_second() -> float:
    """Return the FLOPs per second of a float64 product on the CPU."""
    square = np.ones((_MATRIX_SIZE, _MATRIX_SIZE))
    return 2 * _MATRIX_SIZE**3 / fastest_seconds(lambda: square @ square)


def generation_seconds(plan: Plan, layer_seconds: float) -> float:
    """Return the seconds in which the model generates its windows, from those of a layer for a window.

    Each step also reads the weights and the KV cache, which may take longer than the products.
    """
    text = plan.recipe.text
    if text is None or not text.generated:
        return 0.0
    n_weights = sum(prod(tensor.shape) for tensor in plan.tensors.values())
    speed = 2 * mean_layer_parameters(plan) * text.window_tokens / layer_seconds
    computing = 2.0 * n_weights * len(text.generated) * text.window_tokens / (_GENERATION_EFFICIENCY * speed)
    return max(computing, text.generation_steps * text.generation_bytes / _bytes_per_second(plan.recipe.device))


def _bytes_per_second(device: str) -> float:
    """Return the speed of a device's memory."""
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    copy = torch.empty_like(source)
    return 2 * _COPIED_BYTES / fastest_seconds(lambda: copy.copy_(source), device)


def mean_layer_parameters(plan: Plan) -> float:
    """Return the mean number of weights of a layer."""
    return sum(prod(t.shape) for name, t in plan.tensors.items() if plan.in_layer(name)) / len(plan.conversions)
