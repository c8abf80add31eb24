"""Merge layers by their behaviour on a calibration text.

    FOLDER/model.layers.11….q_proj.npz     layer 11, merged

Letters: H query heads, D head_dim, M outputs.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from convert.calibration.convert_layers import comparison_windows, refit_and_refine, write_layers
from convert.calibration.float32_weights import head_weights, with_head_weights
from convert.calibration.head_moments import HeadSums
from convert.calibration.layer_output import squared_error
from convert.layer_tensors.converted_layer import ConvertedLayer
from convert.layer_tensors.head_matrices import HeadMatrices
from convert.layers.layer_stream import CalibrationLayer
from convert.merging.layer_merge import LayerMerge, finish_layer, merge_with_maps, read_attention
from convert.merging.methods import find_alternatives, find_layer_method
from convert.merging.moments import Moments, moments_from_weights
from convert.merging.norms import normalise
from model.checkpoint import Checkpoint
from model.common.console import Advance


def calibrate_merges(checkpoint: Checkpoint, merges: Sequence[LayerMerge], folder: Path, advance: Advance) -> None:
    """Write every merged layer into `folder`. See `write_layers`."""
    write_layers(checkpoint, merges, folder, advance, partial(merge_layer, checkpoint, merges, advance))


def merge_layer(
    checkpoint: Checkpoint, merges: Sequence[LayerMerge], advance: Advance, layer: CalibrationLayer
) -> ConvertedLayer:
    """Merge one layer on the text, then refit and refine it as the recipe says."""
    merge = merges[layer.index]
    after = _solve(checkpoint, merge, layer)  # a function of its own, so that its memory is free for the next steps
    after = refit_and_refine(layer, merge.recipe, after, head_weights, with_head_weights, advance)
    return finish_layer(checkpoint, merge, read_attention(checkpoint, merge), after)


def _solve(checkpoint: Checkpoint, merge: LayerMerge, layer: CalibrationLayer) -> HeadMatrices:
    """Run the layer on the text. Return the merged layer by the closed form of the method."""
    before = read_attention(checkpoint, merge)
    sums = HeadSums(layer, merge.n_kv_heads, raw_keys=before.norms is not None)
    layer.run(sums.add)
    before = normalise(before, merge.norms, sums.key_scales)
    outputs_HDD = before.o_HMD.transpose(0, 2, 1) @ before.o_HMD
    return _best(layer, before, sums.moments(outputs_HDD, before.n_rotary_pairs), merge.recipe.method)


def _best(layer: CalibrationLayer, before: HeadMatrices, moments: list[Moments], method: str) -> HeadMatrices:
    """Return the merged layer. Of a method's several solutions, choose the one with the least validation error."""
    merge_group, find_others = find_layer_method(method), find_alternatives(method)
    maps = [merge_group(group_moments) for group_moments in moments]
    first = merge_with_maps(before, moments, maps)
    if find_others is None:
        return first
    groups = zip(moments, maps, before.groups(len(moments)), strict=True)
    others = zip(
        *(
            find_others(group_moments, group_maps, moments_from_weights(group_heads))
            for group_moments, group_maps, group_heads in groups
        ),
        strict=True,
    )
    solutions = chain([first], (merge_with_maps(before, moments, list(other_maps)) for other_maps in others))
    windows = comparison_windows(layer)
    return min(solutions, key=lambda merged: squared_error(layer, head_weights(merged), windows))
