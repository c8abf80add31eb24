"""Estimate how long calibration takes: its floating-point operations, at the measured speed of this machine.

Where the model writes the text, each step also reads the weights and the KV cache. That may take longer than the
products.
"""

import time
from dataclasses import replace
from math import prod

import torch

from convert.calibration.choose_method import candidates, part_tried
from convert.calibration.moment_sums import KEY_QUERIES, KEYS_DRAWN
from convert.calibration.text import CalibrationText
from convert.merging.methods import AUTO
from convert.planning.plan import Plan

_SIZE, _REPEATS = 1024, 4
_EFFICIENCY = 0.6
"""Speed of calibration as a share of one matrix product's (SmolLM2-135M on two cores: 0.63)."""
_WRITING_EFFICIENCY = 0.35
"""Speed of writing text as a share of one matrix product's (SmolLM2-135M on two cores, 64 rows: 0.39)."""
_TRAINING = 3
"""Cost of training on a token, in forward passes."""
_BYTES_PER_SECOND = 1e10
"""Speed of reading weights from memory."""


def calibration_seconds(plan: Plan) -> float:
    """Return an estimate in seconds, correct within a factor of two. Measuring takes a tenth of a second."""
    speed = _operations_per_second()
    return calibration_operations(plan) / (_EFFICIENCY * speed) + _writing_seconds(plan, speed)


def _writing_seconds(plan: Plan, operations_per_second: float) -> float:
    text = plan.recipe.text
    if text is None or not text.own or not plan.layers:
        return 0.0
    n_weights = sum(prod(tensor.shape) for tensor in plan.tensors.values())
    computing = 2.0 * n_weights * len(text.own) * text.window / (_WRITING_EFFICIENCY * operations_per_second)
    return max(computing, text.own_steps * text.own_bytes / _BYTES_PER_SECOND)


def calibration_operations(plan: Plan) -> float:
    """Return the FLOPs of forward passes, moments, decompositions and refinement."""
    text, geometry = plan.recipe.text, plan.geometry
    if text is None or not plan.layers:
        return 0.0
    if plan.recipe.method == AUTO:
        return _choosing_operations(plan, text)
    n_weights = sum(prod(t.shape) for name, t in plan.tensors.items() if plan.in_layer(name)) / len(plan.layers)
    heads = geometry.n_heads * geometry.head_dim
    attention = 4 * text.window * heads
    width = geometry.n_kv_heads // plan.n_kv_heads * geometry.head_dim
    keys = 2 * plan.n_kv_heads * KEY_QUERIES * KEYS_DRAWN * width**2
    passes = 2 if plan.recipe.refit else 1
    solving = 60 * plan.n_kv_heads * width**3
    layer = text.n_tokens * (2 * n_weights + passes * attention + (passes - 1) * 8 * heads * geometry.hidden_size)
    merged = 2 * (geometry.n_heads + plan.n_kv_heads) * geometry.head_dim * geometry.hidden_size
    refining = _TRAINING * plan.recipe.refine * (2 * merged + attention)
    return len(plan.layers) * (layer + keys + solving + refining)


def _choosing_operations(plan: Plan, text: CalibrationText) -> float:
    """Return the FLOPs of trying all candidates on a part of the text, then the costliest one on the whole text."""
    tried = candidates(plan.recipe, 1 < plan.n_kv_heads < plan.geometry.n_kv_heads).values()
    on_part = [replace(plan, recipe=replace(recipe, text=part_tried(text))) for recipe in tried]
    on_all = [replace(plan, recipe=recipe) for recipe in tried]
    return sum(map(calibration_operations, on_part)) + max(map(calibration_operations, on_all))


def _operations_per_second() -> float:
    """Measure the speed of a float32 matrix product."""
    a = torch.ones(_SIZE, _SIZE)
    a @ a
    started = time.perf_counter()
    for _ in range(_REPEATS):
        a @ a
    return _REPEATS * 2 * _SIZE**3 / (time.perf_counter() - started)
