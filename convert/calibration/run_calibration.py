"""Calibrate a conversion of either kind, if it has a calibration text."""

from collections.abc import Sequence
from pathlib import Path

from convert.latent.layer import LatentLayer
from convert.merging.layer import LayerConversion, LayerMerge
from convert.merging.recipe import Recipe
from model.checkpoint import Checkpoint
from model.common import console


def calibrate(
    checkpoint: Checkpoint, conversions: Sequence[LayerConversion], recipe: Recipe, folder: Path, quiet: bool
) -> None:
    """Write the converted layers into a folder, if the recipe has a calibration text."""
    text = recipe.text
    if text is None or not conversions:
        return
    from convert.calibration.calibrate_layers import calibrate_layers
    from convert.calibration.latent_fit import calibrate_latent  # imported here, because they need torch

    latent = [conversion for conversion in conversions if isinstance(conversion, LatentLayer)]
    merges = [conversion for conversion in conversions if isinstance(conversion, LayerMerge)]
    assert not latent or not merges
    total = len(conversions) * (text.n_tokens + recipe.refine)
    with console.progress_bar("Calibrating", total, quiet, unit="tokens x layers") as progress:
        if latent:
            calibrate_latent(checkpoint, latent, text, folder, progress)
        else:
            calibrate_layers(checkpoint, merges, text, folder, progress)
