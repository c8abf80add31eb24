"""Run a converted layer's attention on a text, and measure its output error against the original layer.

Letters: N windows, B windows in a batch, T tokens, M hidden size, H query heads, D head_dim, C = H · D.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from convert.calibration.latent_weights import LatentWeights
from convert.layers.layer_stream import CalibrationLayer
from convert.layers.runnable_layer import HeadWeights
from model.decoder.devices import to_float64


def original_output(layer: CalibrationLayer, windows: list[int]) -> Tensor:
    """Return the original layer's attention output without the output projection's bias, [B, T, M].

    Reads the file that `CalibrationLayer.run` writes, so call that first.
    """
    whole_BTM, bias_M = layer.on_device(layer.attended_NTM[windows]), layer.runnable.output_bias
    return whole_BTM if bias_M is None else whole_BTM - bias_M


def heads_and_targets(
    layer: CalibrationLayer, weights: HeadWeights | LatentWeights, windows: Iterable[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each window the converted heads' outputs, [T, H·D], and the original layer's output, [T, M]."""
    weights = weights.to(layer.runnable.device)
    for batch in layer.windows.batches(list(windows)):
        yield from zip(heads_out(layer, weights, layer.inputs(batch)), original_output(layer, batch), strict=True)


def heads_out(layer: CalibrationLayer, weights: HeadWeights | LatentWeights, x_BTM: Tensor) -> Tensor:
    """Return the heads' outputs before the output projection, [B, T, H·D], with other weights than the layer's own."""
    return weights.heads_out(x_BTM) if isinstance(weights, LatentWeights) else layer.runnable.heads_out(weights, x_BTM)


def squared_error(layer: CalibrationLayer, weights: HeadWeights | LatentWeights, windows: Iterable[int]) -> float:
    """Return the squared output error of a converted layer, summed over windows."""
    total, weights = 0.0, weights.to(layer.runnable.device)
    for batch in layer.windows.batches(list(windows)):
        out_BTM = heads_out(layer, weights, layer.inputs(batch)) @ weights.o_MC.T
        total += float(to_float64(original_output(layer, batch) - out_BTM).square().sum())
    return total


def relative_error(
    layer: CalibrationLayer, weights: HeadWeights | LatentWeights, windows: Sequence[int]
) -> float | None:  # fmt: skip
    """Return the squared output error of a converted layer ÷ the original's squared output; None if that is 0."""
    power = output_power(layer, windows)
    return squared_error(layer, weights, windows) / power if power else None


def output_power(layer: CalibrationLayer, windows: Sequence[int]) -> float:
    """Return the squared output of the original layer, summed over windows."""
    batches = layer.windows.batches(list(windows))
    return sum(float(to_float64(original_output(layer, batch)).square().sum()) for batch in batches)
