"""Estimate how long a calibration of merges takes, from the times of the first layer on a window or its beginning.

The layer runs on the device of the calibration. Moments are solved on the CPU, whatever the device.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convert.calibration.convert_layers import MAX_COMPARISON_TOKENS
from convert.calibration.head_moments import KEY_QUERIES, KEYS_PER_GROUP_QUERY, HeadSums
from convert.calibration.refine import EVALUATIONS
from convert.calibration.refit_output import BLOCK
from convert.calibration_text.choices import VALIDATION_EVERY
from convert.estimates.timing import (
    FORWARDS_PER_TRAINED_TOKEN,
    fastest_seconds,
    generation_seconds,
    matmul_flops_per_second,
    mean_layer_parameters,
)
from convert.layers.layer_stream import CalibrationLayer, CalibrationWindows, open_layers
from convert.layers.runnable_layer import HeadWeights
from convert.merging.methods import find_alternatives
from convert.planning.merge_plan import MergePlan
from model.checkpoint import Checkpoint
from model.decoder.devices import computing_on

_MEASURED_OPERATIONS = 5e10
"""Maximum FLOPs of a measurement, of the layer's run and of its key moments: a quarter of a second at 200 GFLOP/s."""
_MIN_TOKENS = 16
_N_SOLUTIONS = 3
"""Solutions that calibration compares: the method's own, and its alternatives."""


@dataclass(frozen=True)
class _Measured:
    """Seconds of a layer, per window but for `load`; and the FLOPs per second of a float64 product on the CPU."""

    load: float
    run: float
    """With its moments."""
    output: float
    """The attention with merged heads, and the sums to refit it."""
    matmul_flops_per_second: float


def merge_seconds(checkpoint: Checkpoint, plan: MergePlan) -> float:
    """Return an estimate in seconds, correct within a factor of two. Measuring takes about a second."""
    if plan.recipe.text is None or not plan.conversions:
        return 0.0
    device = plan.recipe.device
    with computing_on(device), torch.inference_mode():
        measured = _measure(checkpoint, plan)
        generation = generation_seconds(plan, measured.run)
    return len(plan.conversions) * _layer_seconds(plan, measured) + generation


def _layer_seconds(plan: MergePlan, measured: _Measured) -> float:
    recipe, text = plan.recipe, plan.recipe.text
    assert text is not None
    validation = text.n_windows / VALIDATION_EVERY
    n_refits = (2 if recipe.refine else 1) if recipe.refit else 0
    outputs = float(n_refits * text.n_windows)
    if find_alternatives(recipe.method):
        outputs += _N_SOLUTIONS * min(validation, MAX_COMPARISON_TOKENS / text.window_tokens)
    if recipe.refine:
        outputs += (EVALUATIONS + 1) * validation + FORWARDS_PER_TRAINED_TOKEN * recipe.refine / text.window_tokens
    # Decompositions and linear systems: 55 to 98 times the width cubed, for widths of 512 to 2048.
    solving = 80 * plan.n_kv_heads * _width(plan) ** 3 / measured.matmul_flops_per_second
    return measured.load + text.n_windows * measured.run + outputs * measured.output + solving


def _width(plan: MergePlan) -> int:
    """Return the dimensions of a group's keys."""
    return plan.geometry.n_kv_heads // plan.n_kv_heads * plan.geometry.head_dim


def _measure(checkpoint: Checkpoint, plan: MergePlan) -> _Measured:
    """Run the first layer on random states, of a window or, for a large layer, of its beginning."""
    text, geometry = plan.recipe.text, plan.geometry
    assert text is not None
    length = min(text.window_tokens, max(_MIN_TOKENS, int(_MEASURED_OPERATIONS / (2 * mean_layer_parameters(plan)))))
    layers = open_layers(checkpoint, length, plan.recipe.device)
    started = time.perf_counter()
    runnable = layers.load(0)
    load = time.perf_counter() - started
    # Over the whole text there are always as many queries. So a window of a longer text has fewer.
    keys = 2 * plan.n_kv_heads * KEY_QUERIES * KEYS_PER_GROUP_QUERY * _width(plan) ** 2 / text.n_windows
    times_longer = max(1, round(keys / _MEASURED_OPERATIONS))
    shorter = replace(text, window_tokens=length, n_windows=text.n_windows * times_longer)
    states_NTM = np.random.default_rng(0).standard_normal((1, length, geometry.hidden_size), dtype=np.float32)
    layer = CalibrationLayer(CalibrationWindows(shorter), runnable, states_NTM, Path(), lambda n: None)
    sums = HeadSums(layer, plan.n_kv_heads)
    weights = _random_weights(plan).to(runnable.device)

    def output() -> tuple[Tensor, Tensor]:
        out_TC: Tensor = runnable.heads_out(weights, layer.inputs([0]))[0]
        power_CN = out_TC.T @ out_TC[:, : (out_TC.shape[1] + BLOCK) // 2]  # the size of the refit's block triangle
        return power_CN, out_TC.T @ layer.on_device(states_NTM)[0]

    device = plan.recipe.device
    run = fastest_seconds(lambda: runnable.run(layer.on_device(states_NTM), lambda heads: None), device)
    with_moments = fastest_seconds(lambda: runnable.run(layer.on_device(states_NTM), sums.add), device)
    run += times_longer * max(0.0, with_moments - run)
    whole = text.window_tokens / length
    return _Measured(load, whole * run, whole * fastest_seconds(output, device), matmul_flops_per_second())


def _random_weights(plan: MergePlan) -> HeadWeights:
    """Return weights of a merged layer's shapes."""
    geometry, generator = plan.geometry, torch.Generator().manual_seed(0)
    n_inputs = geometry.hidden_size + bool(plan.conversions[0].biases)
    rows = [n * geometry.head_dim for n in (geometry.n_heads, plan.n_kv_heads, plan.n_kv_heads)]
    shapes = [*((n_rows, n_inputs) for n_rows in rows), (geometry.hidden_size, rows[0])]
    return HeadWeights(*(torch.randn(shape, generator=generator) for shape in shapes))
