"""Convert layers to latent attention by their behaviour on a calibration text.

FOLDER/model.layers.11….latent.npz     layer 11, converted
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from convert.calibration.convert_layers import comparison_windows, refit_and_refine, write_layers
from convert.calibration.float32_weights import latent_weights, with_latent_weights
from convert.calibration.input_moments import InputSums
from convert.calibration.latent_queries import solve_queries
from convert.calibration.layer_output import squared_error
from convert.latent.baselines import solve_as
from convert.latent.closed_form import solve_each
from convert.latent.latent_conversion import LatentConversion
from convert.latent.matrices import LatentMatrices
from convert.layer_tensors.converted_layer import ConvertedLayer
from convert.layers.layer_stream import CalibrationLayer
from model.checkpoint import Checkpoint
from model.common.console import Advance

KEY_WEIGHTS = (0.1, 1.0, 10.0)
"""Weights of keys against values in the latent that are tried."""


def calibrate_latent(
    checkpoint: Checkpoint, conversions: Sequence[LatentConversion], folder: Path, advance: Advance
) -> None:
    """Write every converted layer into `folder`. See `write_layers`."""

    def convert(layer: CalibrationLayer) -> ConvertedLayer:
        conversion = conversions[layer.index]
        return conversion.finish(checkpoint, _convert(checkpoint, conversion, layer, advance))

    write_layers(checkpoint, conversions, folder, advance, convert)


def _convert(
    checkpoint: Checkpoint, conversion: LatentConversion, layer: CalibrationLayer, advance: Advance
) -> LatentMatrices:
    sums = InputSums(layer, conversion.sizes.hidden_size)
    layer.run(sums.add)
    before, moments, target = conversion.read(checkpoint), sums.moments(), conversion.target
    windows, to_weights = comparison_windows(layer), partial(latent_weights, frequencies_P=target.frequencies_C)

    def candidates() -> Iterator[LatentMatrices]:
        if conversion.recipe.latent_method != "fit":
            yield solve_as(conversion.recipe.latent_method, before, moments, target)
            return
        for closed in solve_each(before, moments, target, KEY_WEIGHTS):
            yield closed
            yield solve_queries(layer, before, closed, target, sums.training_keys())

    best = min(candidates(), key=lambda latent: squared_error(layer, to_weights(latent), windows))
    return refit_and_refine(
        layer, conversion.recipe, conversion.balance(best), to_weights, with_latent_weights, advance
    )
