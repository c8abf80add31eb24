"""Calibrate a conversion of either kind, if it has a calibration text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from convert.latent.layer import LatentLayer
from convert.merging.clipping import find_clip
from convert.merging.layer import LayerConversion, LayerMerge
from convert.merging.layer_file import load_layer
from convert.merging.recipe import Recipe
from model.checkpoint import Checkpoint
from model.common import checks, console
from model.families import find_family


def calibrate(
    checkpoint: Checkpoint, conversions: Sequence[LayerConversion], recipe: Recipe, folder: Path, quiet: bool
) -> tuple[str, ...]:
    """Write the converted layers into a folder, if the recipe has a calibration text.

    Returns notes for the user on the result.
    """
    text = recipe.text
    if text is None or not conversions:
        return ()
    from convert.calibration.calibrate_layers import calibrate_layers
    from convert.calibration.latent_fit import calibrate_latent  # imported here, because they need torch
    from convert.calibration.within_clip import calibrate_layers_within_clip

    latent = [conversion for conversion in conversions if isinstance(conversion, LatentLayer)]
    merges = [conversion for conversion in conversions if isinstance(conversion, LayerMerge)]
    assert not latent or not merges
    clip = find_clip(find_family(checkpoint.config).config) if merges else None
    total = len(conversions) * (text.n_tokens + recipe.refine)
    with console.progress_bar("Calibrating", total, quiet, unit="tokens x layers") as progress:
        if latent:
            calibrate_latent(checkpoint, latent, text, folder, progress)
        elif clip:
            calibrate_layers_within_clip(checkpoint, merges, text, folder, progress)
        else:
            calibrate_layers(checkpoint, merges, text, folder, progress)
    return tuple(_clipping(clip, merges, folder)) if clip else ()


def _clipping(clip: Any, merges: list[LayerMerge], folder: Path) -> Iterator[str]:
    """Yield a note if the model's clip cuts merged heads on the calibration text."""
    counts = [load_layer(merge, folder).cut for merge in merges]
    n_cut, n_values = (sum(column) for column in zip(*counts, strict=True))
    if n_cut:
        yield (
            f"clip_qkv = {checks.short_repr(clip)} cuts {n_cut:,} of {n_values:,} values of the merged layers on the "
            "calibration text."
        )
