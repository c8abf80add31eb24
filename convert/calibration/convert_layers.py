"""Convert the layers of a model one by one on a calibration text, whatever replaces their attention."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from convert.calibration.float32_weights import AnyMatrices, AnyWeights, converted_weights
from convert.calibration.latent_weights import LatentWeights
from convert.calibration.layer_output import heads_and_targets, relative_error, squared_error
from convert.calibration.refine import refine
from convert.calibration.refit_output import refit_output
from convert.layer_tensors.converted_layer import ConvertedLayer, LayerConversion
from convert.layer_tensors.layer_file import FINISHED, save_layer
from convert.layer_tensors.rounding import tensors_to_float64
from convert.layers.layer_stream import CalibrationLayer, iter_layers, last_states, validation_text
from convert.layers.runnable_layer import HeadWeights
from convert.recipe import Recipe
from model.checkpoint import Checkpoint
from model.common.console import Advance
from model.common.errors import CheckpointError
from model.decoder.devices import computing_on
from model.files.write import sync_folder

MAX_COMPARISON_TOKENS = 4096
"""Maximum validation tokens on which solutions are compared."""


@torch.no_grad()
def write_layers(
    checkpoint: Checkpoint, conversions: Sequence[LayerConversion], folder: Path, advance: Advance,
    convert: Callable[[CalibrationLayer], ConvertedLayer],
) -> None:  # fmt: skip
    """Run the recipe's text through the source's layers, and write what `convert` returns for each into `folder`.

    `advance` counts tokens, of the text and of refining, layer by layer. A killed run resumes at the layer it had
    reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FINISHED).exists():
        return
    recipe = conversions[0].recipe
    assert recipe.text is not None
    with computing_on(recipe.device):
        for layer in iter_layers(checkpoint, recipe.text, folder, advance, recipe.device, recipe.refine):
            conversion, converted = conversions[layer.index], convert(layer)
            save_layer(replace(converted, output_error=_output_error(layer, conversion, converted)), conversion, folder)
    sync_folder(folder)
    (folder / FINISHED).touch()
    last_states(folder).unlink()


def _output_error(layer: CalibrationLayer, conversion: LayerConversion, converted: ConvertedLayer) -> float | None:
    """Return the output error of the layer's tensors, rounded as they are. Raises CheckpointError if not finite."""
    weights = converted_weights(conversion, tensors_to_float64(converted.tensors))
    error = relative_error(layer, weights, comparison_windows(layer))
    if error is not None and not math.isfinite(error):
        raise CheckpointError(
            f"layer {layer.index}'s converted attention produces NaN or infinite values on the text; the checkpoint is "
            "damaged, or its values are too large to be calibrated; --calibration none converts without a text."
        )
    return error


@torch.no_grad()
def validation_errors(
    checkpoint: Checkpoint,
    recipe: Recipe,
    folder: Path,
    indices: Collection[int],
    versions: Callable[[int], Sequence[HeadWeights | LatentWeights]],
) -> dict[int, list[float]]:
    """Return the validation errors of versions of some layers on a recipe's text, by layer index.

    `versions` returns the versions of a layer, given its index. Only the validation windows are run, up to the last of
    these layers.
    """
    assert recipe.text is not None
    text = validation_text(recipe.text)
    folder.mkdir(parents=True)
    errors, last = {}, max(indices)
    with computing_on(recipe.device):
        for layer in iter_layers(checkpoint, text, folder, lambda n: None, recipe.device):
            layer.run(lambda heads: None)
            if layer.index in indices:
                windows = list(range(text.n_windows))
                errors[layer.index] = [squared_error(layer, weights, windows) for weights in versions(layer.index)]
            if layer.index == last:
                break
    return errors


def refit_and_refine(
    layer: CalibrationLayer,
    recipe: Recipe,
    attention: AnyMatrices,
    to_weights: Callable[[AnyMatrices], AnyWeights],
    from_weights: Callable[[AnyMatrices, AnyWeights], AnyMatrices],
    advance: Advance,
) -> AnyMatrices:
    """Return the attention with its output projection refitted, all of it refined, and the projection refitted again.

    The recipe says which of this is done. `to_weights` copies the attention to float32, and `from_weights` puts such
    values back.
    """

    def refitted(attention: AnyMatrices) -> AnyMatrices:
        samples = heads_and_targets(layer, to_weights(attention), range(layer.windows.n_windows))
        return refit_output(attention, samples, layer.runnable.device)

    if recipe.refit:
        attention = refitted(attention)
    if recipe.refine:
        start = to_weights(attention)
        best = refine(layer, start, recipe.refine, recipe.seed, advance)
        if best is not start:  # training changed queries, keys and values, so another projection is best
            attention = from_weights(attention, best)
            attention = refitted(attention) if recipe.refit else attention
    return attention


def comparison_windows(layer: CalibrationLayer) -> list[int]:
    """Return the validation windows on which solutions are compared."""
    validation = layer.windows.validation_windows
    return validation[: -(-MAX_COMPARISON_TOKENS // layer.windows.window_tokens)]
