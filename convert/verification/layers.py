"""Recompute layers that a conversion computed as a whole, and compare them within tolerances."""

import shutil
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import numpy as np

from convert.latent.latent_recipe import LATENT
from convert.layer_tensors.converted_layer import LayerConversion
from convert.layer_tensors.rounding import BFLOAT16, tensors_to_float64
from convert.output.groupwise_json import layer_errors
from convert.output.layer_cache import ConvertedLayerCache
from convert.recipe import Recipe
from convert.verification.comparison import Comparison
from model.checkpoint import Array
from model.common.console import format_bytes
from model.common.errors import CheckpointError

if TYPE_CHECKING:
    from convert.calibration.latent_weights import LatentWeights
    from convert.layers.runnable_layer import HeadWeights

WEIGHTS_ONLY_TOL = 1e-3
"""Tolerances for a layer merged by the weights alone: a tensor's error as a share of its norm, and an element's error
as a share of the tensor's root mean square."""
CALIBRATED_TENSOR_TOL, CALIBRATED_ELEMENT_TOL = 1e-2, 0.25
"""The same tolerances for a layer merged with a calibration text.

On another kind of processor, or on a GPU, about one in 10^5 of the drawn keys differs. That changes the tensors of
SmolLM2 by up to 0.0033 of their norms, and single elements by up to 0.14 of their root mean square.
"""
MAX_ERROR_RATIO = 1.05
"""Maximum validation error of a refined layer, relative to the recomputed layer's. Training amplifies the differences
between processors, so the weights themselves cannot be compared."""


def recompute_layers(comparison: Comparison, scratch: Path, workers: int, quiet: bool) -> ConvertedLayerCache | None:
    """Return the converted layers; None if they cannot be recomputed."""
    source, plan = comparison.source, comparison.plan
    if comparison.findings.unchecked:
        return None
    free = shutil.disk_usage(scratch).free
    if plan.scratch_bytes > free:
        raise CheckpointError(
            f"{gettempdir()} has {format_bytes(free)} free, but {format_bytes(plan.scratch_bytes)} are needed to run "
            "the calibration again; set TMPDIR to a folder with more free space."
        )
    if plan.recipe.text is not None and plan.conversions:
        from convert.calibration.calibrate import calibrate  # imported here, because it needs torch

        calibrate(source, plan.conversions, scratch, quiet)
        comparison.layer_errors.extend(layer_errors(plan.conversions, scratch))
    return ConvertedLayerCache(source, plan.workers(workers), scratch if plan.recipe.text else None)


def compare_layer_tensor(
    comparison: Comparison, layer: LayerConversion, layers: ConvertedLayerCache, name: str
) -> list[str]:
    """Compare a tensor of a converted layer within a tolerance, because its last digits depend on the order of sums.

    Any later change to the tensor is found by the recorded checksum.
    """
    converted = layers.get(layer)
    actual, expected = comparison.out.all_rows(name), converted.tensors[name]
    if actual.tobytes() == expected.tobytes():
        for heads in comparison.plan.computed[name].reported_heads:
            comparison.reports[heads.label] = converted.reports[heads.label]
        return []
    if is_compared_by_errors(layer.recipe):
        return []  # see `compare_by_errors`
    wide, wide_actual = expected.astype(np.float64), actual.astype(np.float64)
    step = 2.0 ** -(7 if expected.dtype == BFLOAT16 else 10)  # of bfloat16 or float16; sufficient for finer dtypes too
    beyond = np.maximum(np.abs(wide - wide_actual) - step * np.abs(wide), 0) / (np.sqrt(np.mean(wide**2)) or 1.0)
    error = float(np.sqrt(np.mean(beyond**2)))
    tensor_tol, element_tol = WEIGHTS_ONLY_TOL, WEIGHTS_ONLY_TOL
    if layer.recipe.text:
        tensor_tol, element_tol = CALIBRATED_TENSOR_TOL, CALIBRATED_ELEMENT_TOL
    if error <= tensor_tol and beyond.max() <= element_tol:  # false for NaN
        comparison.findings.rounded[name] = error
        return []
    return [f"the tensor {name} differs from the one recomputed from the source"]


def is_compared_by_errors(recipe: Recipe) -> bool:
    """Return whether layers are compared by what they compute, because their weights are not determined by it.

    A latent in other coordinates computes the same.
    """
    return bool(recipe.refine) or (recipe.method == LATENT and recipe.text is not None)


def compare_by_errors(comparison: Comparison, layers: ConvertedLayerCache, scratch: Path) -> None:
    """Compare layers that were refined or have a latent, and differ from the recomputed ones, by validation errors."""
    from convert.calibration.convert_layers import validation_errors
    from convert.calibration.float32_weights import converted_weights

    out, plan, findings = comparison.out, comparison.plan, comparison.findings

    def versions(index: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return a layer's tensors in OUT, and the recomputed ones."""
        expected = layers.get(plan.conversions[index]).tensors
        return {name: out.all_rows(name) for name in expected}, expected

    def weights(index: int) -> "list[HeadWeights | LatentWeights]":
        return [converted_weights(plan.conversions[index], tensors_to_float64(tensors)) for tensors in versions(index)]

    def differs(index: int) -> bool:
        actual, expected = versions(index)
        return any(actual[name].tobytes() != expected[name].tobytes() for name in expected)

    different = {index for index in range(len(plan.conversions)) if differs(index)}
    errors = validation_errors(comparison.source, plan.recipe, scratch, different, weights) if different else {}
    for index, (actual, expected) in errors.items():
        if actual <= MAX_ERROR_RATIO * expected:  # false for NaN
            excess = max(0.0, actual / expected - 1) if expected else 0.0
            findings.rounded |= dict.fromkeys(plan.conversions[index].tensor_names, excess)
        else:
            findings.differences.append(
                f"layer {index} has a validation error of {actual:.4g}; recomputing it gives {expected:.4g}"
            )
