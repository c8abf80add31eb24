"""Merge layers of a class that clips queries, keys and values (`clip_qkv` of OLMo and MPT).

A layer is merged as if its own heads were not clipped, and then scaled so that none of them is clipped, or few.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from convert.calibration.convert_layers import write_layers
from convert.calibration.float32_weights import head_weights
from convert.calibration.merge_layers import merge_layer
from convert.layer_tensors.converted_layer import ConvertedLayer
from convert.layer_tensors.layer_file import load_layer
from convert.layer_tensors.rounding import tensors_to_float64
from convert.layers.clipped_heads import ClippedHeads
from convert.layers.layer_stream import CalibrationLayer
from convert.layers.runnable_layer import HeadWeights
from convert.merging.clipping import find_clip, scale_into_clip
from convert.merging.layer_merge import LayerMerge, finish_layer, output_attention, read_attention
from model.checkpoint import Checkpoint
from model.common import checks
from model.common.console import Advance


def calibrate_merges_within_clip(
    checkpoint: Checkpoint, merges: Sequence[LayerMerge], folder: Path, advance: Advance
) -> tuple[str, ...]:
    """Write every merged layer into `folder`, as `calibrate_merges` does.

    Returns a note if merged heads are clipped on the text.
    """
    convert = partial(_merge, checkpoint, merges, advance)
    write_layers(checkpoint, merges, folder, advance, convert)
    counts = [load_layer(merge, folder).clipped for merge in merges]
    n_clipped, n_values = (sum(column) for column in zip(*counts, strict=True))
    if n_clipped == 0:
        return ()
    clip = checks.short_repr(find_clip(checkpoint))
    of_all = f"{n_clipped:,} of {n_values:,} values"
    return (f"clip_qkv = {clip} clips {of_all} of the merged layers on the calibration text.",)


def _merge(
    checkpoint: Checkpoint, merges: Sequence[LayerMerge], advance: Advance, layer: CalibrationLayer
) -> ConvertedLayer:
    if layer.runnable.clip is None:  # a class that does not read the setting
        return merge_layer(checkpoint, merges, advance, layer)
    source = _heads(layer, None)
    source.check(layer.index, "on the calibration text")
    converted = merge_layer(checkpoint, merges, advance, layer)
    merge = merges[layer.index]
    merged = output_attention(tensors_to_float64(converted.tensors), merge)
    scaled = scale_into_clip(merged, _heads(layer, head_weights(merged)).largest, source.largest, source.clip)
    clipped = _heads(layer, head_weights(scaled))
    converted = finish_layer(checkpoint, merge, read_attention(checkpoint, merge), scaled)
    return replace(converted, clipped=(clipped.n_clipped, clipped.n_values))


def _heads(layer: CalibrationLayer, weights: HeadWeights | None) -> ClippedHeads:
    """Run the text through the projections of a layer, or through others."""
    assert layer.runnable.clip is not None
    heads = ClippedHeads(layer.runnable.clip)
    weights = weights and weights.to(layer.runnable.device)
    for windows in layer.windows.batches():
        heads.add(layer.runnable.unclipped_heads(weights, layer.inputs(windows)))
    return heads
