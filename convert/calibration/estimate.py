"""How long calibrating will take: its multiplications, at the speed this machine does them.

Where the model writes the text, reading its weights and KV cache at each step may take longer than multiplying.
"""

import time
from dataclasses import replace
from math import prod

import torch

from convert.calibration.auto import candidates, part_tried
from convert.calibration.solve import KEY_QUERIES, KEYS_DRAWN
from convert.calibration.text import CalibrationText
from convert.merging.methods import AUTO
from convert.planning.plan import Plan

_SIZE, _TIMES = 1024, 4
_EFFICIENCY = 0.6
"""Of the speed of one matrix product, what calibrating reaches (SmolLM2-135M on two cores: 0.63)."""
_WRITING_EFFICIENCY = 0.35
"""The same of writing text (SmolLM2-135M on two cores, 64 rows: 0.39)."""
_TRAINING = 3
"""What a token costs that is trained on, in forward passes."""
_BYTES_PER_SECOND = 1e10
"""At which weights are read from memory."""


def calibration_seconds(plan: Plan) -> float:
    """Return an estimate in seconds; half or twice as long is possible. Takes a tenth of a second."""
    speed = _operations_per_second()
    return calibration_operations(plan) / (_EFFICIENCY * speed) + _writing_seconds(plan, speed)


def _writing_seconds(plan: Plan, operations_per_second: float) -> float:
    sample = plan.recipe.sample
    if sample is None or not sample.own or not plan.layers:
        return 0.0
    numbers = sum(prod(tensor.shape) for tensor in plan.tensors.values())
    computing = 2.0 * numbers * len(sample.own) * sample.window / (_WRITING_EFFICIENCY * operations_per_second)
    return max(computing, sample.own_steps * sample.own_bytes / _BYTES_PER_SECOND)


def calibration_operations(plan: Plan) -> float:
    """Return floating-point operations: layers passing the text, heads looked at on the way, matrices decomposed."""
    sample, geometry = plan.recipe.sample, plan.geometry
    if sample is None or not plan.layers:
        return 0.0
    if plan.recipe.method == AUTO:
        return _choosing_operations(plan, sample)
    numbers = sum(prod(t.shape) for name, t in plan.tensors.items() if "layers." in name) / geometry.n_layers
    heads = geometry.n_heads * geometry.head_dim
    attention = 4 * sample.window * heads
    width = geometry.n_kv_heads // plan.n_kv_heads * geometry.head_dim
    keys = 2 * plan.n_kv_heads * KEY_QUERIES * KEYS_DRAWN * width**2
    passes = 2 if plan.recipe.refit else 1
    solving = 60 * plan.n_kv_heads * width**3
    layer = sample.n_tokens * (2 * numbers + passes * attention + (passes - 1) * 8 * heads * geometry.hidden_size)
    merged = 2 * (geometry.n_heads + plan.n_kv_heads) * geometry.head_dim * geometry.hidden_size
    refining = _TRAINING * plan.recipe.refine * (2 * merged + attention)
    return geometry.n_layers * (layer + keys + solving + refining)


def _choosing_operations(plan: Plan, sample: CalibrationText) -> float:
    """Return the operations of trying all candidates on a part of the text, and of the most costly on all of it."""
    tried = candidates(plan.recipe, 1 < plan.n_kv_heads < plan.geometry.n_kv_heads).values()
    on_part = [replace(plan, recipe=replace(recipe, sample=part_tried(sample))) for recipe in tried]
    on_all = [replace(plan, recipe=recipe) for recipe in tried]
    return sum(map(calibration_operations, on_part)) + max(map(calibration_operations, on_all))


def _operations_per_second() -> float:
    """Measure a matrix product in float32."""
    a = torch.ones(_SIZE, _SIZE)
    a @ a
    started = time.perf_counter()
    for _ in range(_TIMES):
        a @ a
    return _TIMES * 2 * _SIZE**3 / (time.perf_counter() - started)
