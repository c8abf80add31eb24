"""Calibrate a conversion of either kind: convert all layers of a model on a text."""

from collections.abc import Sequence
from pathlib import Path

from convert.calibration.latent_fit import calibrate_latent
from convert.calibration.merge_layers import calibrate_merges
from convert.calibration.within_clip import calibrate_merges_within_clip
from convert.latent.latent_conversion import LatentConversion
from convert.layer_tensors.converted_layer import LayerConversion
from convert.merging.clipping import find_clip
from convert.merging.layer_merge import LayerMerge
from model.checkpoint import Checkpoint
from model.common import console


def calibrate(
    checkpoint: Checkpoint, conversions: Sequence[LayerConversion], folder: Path, quiet: bool
) -> tuple[str, ...]:
    """Write the converted layers into a folder, by their recipe, which has a calibration text. See `write_layers`.

    All `conversions` are of one kind. Returns notes for the user on the result.
    """
    recipe = conversions[0].recipe
    assert recipe.text is not None
    merges = [each for each in conversions if isinstance(each, LayerMerge)]
    latent = [each for each in conversions if isinstance(each, LatentConversion)]
    total = len(conversions) * (recipe.text.n_tokens + recipe.refine)
    with console.progress_bar("Calibrating", total, quiet, unit="tokens x layers") as progress:
        if latent:
            calibrate_latent(checkpoint, latent, folder, progress)
        elif find_clip(checkpoint):
            return calibrate_merges_within_clip(checkpoint, merges, folder, progress)
        else:
            calibrate_merges(checkpoint, merges, folder, progress)
    return ()
