"""Merge layers by their behaviour on a calibration text.

    FOLDER/model.layers.11….q_proj.npz     layer 11, merged

Letters: B windows in a batch, T tokens, N tokens of a batch, M hidden size, H query heads, K key/value heads, D
head_dim, X inputs (the hidden size, and a constant 1 where there are biases).
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from convert.calibration.latent_weights import LatentWeights
from convert.calibration.layer_output import (
    AnyAttention,
    AnyWeights,
    outputs,
    squared_error,
    weights_of,
    with_weights,
)
from convert.calibration.moment_sums import MomentSums
from convert.calibration.refine import refine
from convert.calibration.refit_output import refit_output
from convert.calibration_text.text import CalibrationText
from convert.layers.layer_stream import Layer, iter_layers, last_states, validation_text
from convert.layers.runnable_layer import Weights
from convert.merging.layer import (
    ConvertedLayer,
    LayerConversion,
    LayerMerge,
    finish_layer,
    merge_with_maps,
    read_attention,
)
from convert.merging.layer_file import FINISHED, save_layer
from convert.merging.methods import find_alternatives, find_layer_method
from convert.merging.moments import Moments, moments_from_weights
from convert.merging.norms import normalise
from convert.merging.recipe import Recipe
from convert.merging.weights import LayerAttention
from model.checkpoint import Checkpoint
from model.common.console import Advance
from model.common.files import sync_folder
from model.decoder.devices import fast_float32_matmul, out_of_memory_as_run_error

MAX_COMPARISON_TOKENS = 4096
"""Maximum validation tokens on which solutions are compared."""


def calibrate_layers(
    checkpoint: Checkpoint, merges: Sequence[LayerMerge], text: CalibrationText, folder: Path, advance: Advance
) -> None:  # fmt: skip
    """Write every merged layer into `folder`. See `write_layers`."""
    write_layers(checkpoint, merges, text, folder, advance, partial(merge_layer, checkpoint, merges, advance))


@torch.no_grad()
def write_layers(
    checkpoint: Checkpoint, conversions: Sequence[LayerConversion], text: CalibrationText, folder: Path,
    advance: Advance, convert: Callable[[Layer], ConvertedLayer],
) -> None:  # fmt: skip
    """Run the text through the source's layers, and write what `convert` returns for each into `folder`.

    `advance` counts tokens, of the text and of refining, layer by layer. A killed run resumes at the layer it had
    reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / FINISHED).exists():
        return
    recipe = conversions[0].recipe
    with out_of_memory_as_run_error(recipe.device), fast_float32_matmul(recipe.device):
        for layer in iter_layers(checkpoint, text, folder, advance, recipe.device, recipe.refine):
            save_layer(convert(layer), conversions[layer.index], folder)
    sync_folder(folder)
    (folder / FINISHED).touch()
    last_states(folder).unlink()


@torch.no_grad()
def validation_errors(
    checkpoint: Checkpoint,
    recipe: Recipe,
    folder: Path,
    indices: Collection[int],
    versions: Callable[[int], Sequence[Weights | LatentWeights]],
) -> dict[int, list[float]]:
    """Return the validation errors of versions of some layers on a recipe's text, by layer index.

    `versions` returns the versions of a layer, given its index. Only the validation windows are run, up to the last of
    these layers.
    """
    assert recipe.text is not None
    text = validation_text(recipe.text)
    folder.mkdir(parents=True)
    errors, last = {}, max(indices)
    with fast_float32_matmul(recipe.device):
        for layer in iter_layers(checkpoint, text, folder, lambda n: None, recipe.device):
            layer.run(lambda heads: None)
            if layer.index in indices:
                windows = list(range(text.n_windows))
                errors[layer.index] = [squared_error(layer, weights, windows) for weights in versions(layer.index)]
            if layer.index == last:
                break
    return errors


def merge_layer(
    checkpoint: Checkpoint, merges: Sequence[LayerMerge], advance: Advance, layer: Layer
) -> ConvertedLayer:  # fmt: skip
    merge = merges[layer.index]
    after = _solve(checkpoint, merge, layer)  # a function of its own, so that its memory is free for the next steps
    after = refit_and_refine(layer, merge.recipe, after, weights_of, with_weights, advance)
    return finish_layer(checkpoint, merge, read_attention(checkpoint, merge), after)


def refit_and_refine(
    layer: Layer,
    recipe: Recipe,
    attention: AnyAttention,
    weights_of: Callable[[AnyAttention], AnyWeights],
    with_weights: Callable[[AnyAttention, AnyWeights], AnyAttention],
    advance: Advance,
) -> AnyAttention:
    """Return the attention with its output projection refitted, all of it refined, and the projection refitted again.

    The recipe says which of this is done. `weights_of` copies the attention to float32, and `with_weights` puts such
    values back.
    """

    def refitted(attention: AnyAttention) -> AnyAttention:
        answers = outputs(layer, weights_of(attention), range(layer.windows.n_windows))
        return refit_output(attention, answers, layer.runnable.device)

    if recipe.refit:
        attention = refitted(attention)
    if recipe.refine:
        start = weights_of(attention)
        best = refine(layer, start, recipe.refine, recipe.seed, advance)
        if best is not start:  # training changed queries, keys and values, so another projection is best
            attention = with_weights(attention, best)
            attention = refitted(attention) if recipe.refit else attention
    return attention


def _solve(checkpoint: Checkpoint, merge: LayerMerge, layer: Layer) -> LayerAttention:
    """Run the layer on the text. Return the merged layer by the closed form of the method."""
    before = read_attention(checkpoint, merge)
    sums = MomentSums(layer, merge.n_kv_heads, raw_keys=before.norms is not None)
    layer.run(sums.add)
    before = normalise(before, merge.norms, sums.key_scales)
    outputs_HDD = before.o_HMD.transpose(0, 2, 1) @ before.o_HMD
    return _best(layer, before, sums.moments(outputs_HDD, before.n_rotary_pairs), merge.recipe.method)


def _best(layer: Layer, before: LayerAttention, moments: list[Moments], method: str) -> LayerAttention:
    """Return the merged layer. Of a method's several solutions, choose the one with the least validation error."""
    merge_group, find_others = find_layer_method(method), find_alternatives(method)
    maps = [merge_group(group_moments) for group_moments in moments]
    first = merge_with_maps(before, moments, maps)
    if find_others is None:
        return first
    groups = zip(moments, maps, before.groups(len(moments)), strict=True)
    others = zip(*(find_others(known, own, moments_from_weights(group)) for known, own, group in groups), strict=True)
    solutions = chain([first], (merge_with_maps(before, moments, list(other_maps)) for other_maps in others))
    windows = comparison_windows(layer)
    return min(solutions, key=lambda merged: squared_error(layer, weights_of(merged), windows))


def comparison_windows(layer: Layer) -> list[int]:
    """Return the validation windows on which solutions are compared."""
    validation = layer.windows.validation_windows
    return validation[: -(-MAX_COMPARISON_TOKENS // layer.windows.window_tokens)]
