"""Estimate how long calibration takes, from the times that the first layer takes on a window or its beginning.

The layer runs on the device of the calibration. Moments are solved on the CPU, whatever the device. Where the model
writes the text, each step also reads the weights and the KV cache. That may take longer than the products.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convert.calibration.calibrate_layers import MAX_COMPARISON_TOKENS
from convert.calibration.moment_sums import KEY_QUERIES, KEYS_DRAWN, MomentSums
from convert.calibration.refine import EVALUATIONS
from convert.calibration.refit_output import BLOCK
from convert.layers.layer_stream import VALIDATION_EVERY, CalibrationWindows, Layer, open_layers
from convert.layers.runnable_layer import Weights
from convert.merging.methods import find_alternatives
from convert.planning.merge_plan import MergePlan
from convert.planning.plan import Plan
from model.checkpoint import Checkpoint
from model.decoder.devices import fast_float32_matmul

_MEASURED_OPERATIONS = 5e10
"""Maximum FLOPs of a measurement, of the layer's run and of its key moments: a quarter of a second at 200 GFLOP/s."""
_LEAST_TOKENS = 16
_MAX_RUNS, _MAX_SECONDS = 3, 0.2
"""Number of runs, of which the fastest counts, and the seconds after which no further one begins."""
_MATRIX_SIZE = 512
_N_ALTERNATIVES = 3
"""Number of solutions of a method with alternatives."""
FORWARDS_PER_TRAINED_TOKEN = 3
"""Cost of training on a token, in forward passes."""
_WRITING_EFFICIENCY = 0.5
"""Speed of writing text as a share of a layer's speed."""
_COPIED_BYTES = 1 << 27
"""Size of the tensor whose copy measures the speed of memory, more than caches hold."""


@dataclass(frozen=True)
class _Measured:
    """Seconds of a layer, per window but for `load`; and the FLOPs per second of a float64 product on the CPU."""

    load: float
    run: float
    """With its moments."""
    output: float
    """The attention with merged heads, and the sums to refit it."""
    solving_speed: float


def calibration_seconds(checkpoint: Checkpoint, plan: MergePlan) -> float:
    """Return an estimate in seconds, correct within a factor of two. Measuring takes about a second."""
    if plan.recipe.text is None or not plan.conversions:
        return 0.0
    with torch.inference_mode(), fast_float32_matmul(plan.recipe.device):
        measured = _measure(checkpoint, plan)
        writing = writing_seconds(plan, measured.run)
    return len(plan.conversions) * _layer_seconds(plan, measured) + writing


def _layer_seconds(plan: MergePlan, measured: _Measured) -> float:
    recipe, text = plan.recipe, plan.recipe.text
    assert text is not None
    validation = text.n_windows / VALIDATION_EVERY
    n_refits = (2 if recipe.refine else 1) if recipe.refit else 0
    outputs = float(n_refits * text.n_windows)
    if find_alternatives(recipe.method):
        outputs += _N_ALTERNATIVES * min(validation, MAX_COMPARISON_TOKENS / text.window_tokens)
    if recipe.refine:
        outputs += (EVALUATIONS + 1) * validation + FORWARDS_PER_TRAINED_TOKEN * recipe.refine / text.window_tokens
    # Decompositions and linear systems: 55 to 98 times the width cubed, for widths of 512 to 2048.
    solving = 80 * plan.n_kv_heads * _width(plan) ** 3 / measured.solving_speed
    return measured.load + text.n_windows * measured.run + outputs * measured.output + solving


def writing_seconds(plan: Plan, layer_seconds: float) -> float:
    """Return the seconds in which the model writes its windows, from those of a layer for a window."""
    text = plan.recipe.text
    if text is None or not text.generated:
        return 0.0
    n_weights = sum(prod(tensor.shape) for tensor in plan.tensors.values())
    speed = 2 * _layer_weights(plan) * text.window_tokens / layer_seconds
    computing = 2.0 * n_weights * len(text.generated) * text.window_tokens / (_WRITING_EFFICIENCY * speed)
    return max(computing, text.generation_steps * text.generation_bytes / _bytes_per_second(plan.recipe.device))


def _bytes_per_second(device: str) -> float:
    """Return the speed of a device's memory."""
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    copy = torch.empty_like(source)
    return 2 * _COPIED_BYTES / fastest(lambda: float(copy.copy_(source)[0]))  # `float` waits for a GPU


def _width(plan: MergePlan) -> int:
    """Return the dimensions of a group's keys."""
    return plan.geometry.n_kv_heads // plan.n_kv_heads * plan.geometry.head_dim


def _layer_weights(plan: Plan) -> float:
    """Return the mean number of weights of a layer."""
    return sum(prod(t.shape) for name, t in plan.tensors.items() if plan.in_layer(name)) / len(plan.conversions)


def _measure(checkpoint: Checkpoint, plan: MergePlan) -> _Measured:
    """Run the first layer on random states, of a window or, for a large layer, of its beginning."""
    text, geometry = plan.recipe.text, plan.geometry
    assert text is not None
    length = min(text.window_tokens, max(_LEAST_TOKENS, int(_MEASURED_OPERATIONS / (2 * _layer_weights(plan)))))
    layers = open_layers(checkpoint, length, plan.recipe.device)
    started = time.perf_counter()
    runnable = layers.load(0)
    load = time.perf_counter() - started
    # Over the whole text there are always as many queries. So a window of a longer text has fewer.
    keys = 2 * plan.n_kv_heads * KEY_QUERIES * KEYS_DRAWN * _width(plan) ** 2 / text.n_windows
    times_longer = max(1, round(keys / _MEASURED_OPERATIONS))
    shorter = replace(text, window_tokens=length, n_windows=text.n_windows * times_longer)
    states_NTM = np.random.default_rng(0).standard_normal((1, length, geometry.hidden_size), dtype=np.float32)
    layer = Layer(CalibrationWindows(shorter), runnable, states_NTM, Path(), lambda n: None)
    sums = MomentSums(layer, plan.n_kv_heads)
    weights = _random_weights(plan).to(runnable.device)

    def output() -> None:
        out_TC: Tensor = runnable.heads_out(weights, layer.inputs([0]))[0]
        power_CN = out_TC.T @ out_TC[:, : (out_TC.shape[1] + BLOCK) // 2]  # the size of the refit's block triangle
        float(power_CN.sum() + (out_TC.T @ layer.on_device(states_NTM)[0]).sum())  # waits for a GPU

    run = fastest(lambda: runnable.run(layer.on_device(states_NTM), lambda heads: None))
    with_moments = fastest(lambda: runnable.run(layer.on_device(states_NTM), sums.add))
    run += times_longer * max(0.0, with_moments - run)
    whole = text.window_tokens / length
    return _Measured(load, whole * run, whole * fastest(output), solving_speed())


def solving_speed() -> float:
    """Return the FLOPs per second of a float64 product on the CPU."""
    square = np.ones((_MATRIX_SIZE, _MATRIX_SIZE))
    return 2 * _MATRIX_SIZE**3 / fastest(lambda: square @ square)


def _random_weights(plan: MergePlan) -> Weights:
    """Return weights of a merged layer's shapes."""
    geometry, generator = plan.geometry, torch.Generator().manual_seed(0)
    n_inputs = geometry.hidden_size + bool(plan.conversions[0].biases)
    rows = [n * geometry.head_dim for n in (geometry.n_heads, plan.n_kv_heads, plan.n_kv_heads)]
    shapes = [*((n_rows, n_inputs) for n_rows in rows), (geometry.hidden_size, rows[0])]
    return Weights(*(torch.randn(shape, generator=generator) for shape in shapes))


def fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several runs. The first one also fills caches."""
    seconds: list[float] = []
    while len(seconds) < _MAX_RUNS and sum(seconds) < _MAX_SECONDS:
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
