"""Run a merged layer's attention on a text, and measure its output error against the original layer.

Letters: N windows, B windows in a batch, T tokens, M hidden size, H query heads, K key/value heads, D head_dim, C =
heads · D, X inputs (the hidden size, and a constant 1 where there are biases).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from convert.calibration.latent_weights import LatentWeights
from convert.latent.matrices import LatentMatrices
from convert.layers.layer_stream import Layer
from convert.layers.runnable_layer import Weights
from convert.merging.weights import LayerAttention, Real, join_heads, split_heads
from model.decoder.devices import to_float64

AnyAttention = TypeVar("AnyAttention", LayerAttention, LatentMatrices)
AnyWeights = TypeVar("AnyWeights", Weights, LatentWeights)


def weights_of(attention: LayerAttention) -> Weights:
    """Copy a layer's attention to float32, on the CPU."""
    rows = [heads.reshape(-1, heads.shape[2]) for heads in (*attention.projections, attention.v_KDX)]
    norms = (attention.norms.q_HD, attention.norms.k_KD) if attention.norms else ()
    return Weights(*(torch.from_numpy(matrix).float() for matrix in (*rows, join_heads(attention.o_HMD), *norms)))


def with_weights(attention: LayerAttention, weights: Weights) -> LayerAttention:
    """Return the attention with other values, in float64."""
    q_CX, k_CX, v_CX, o_MC, *norms = (matrix.detach().cpu().double().numpy() for matrix in weights)
    q_HDX, k_KDX, v_KDX = q_CX.reshape(attention.q_HDX.shape), k_CX.reshape(attention.k_KDX.shape), v_CX
    if norms:
        q_HDX, k_KDX = (heads * norm[:, :, None] for heads, norm in zip((q_HDX, k_KDX), norms, strict=True))
    return replace(
        with_output(attention, o_MC),
        q_HDX=q_HDX,
        k_KDX=k_KDX,
        v_KDX=v_KDX.reshape(attention.v_KDX.shape),
        norms=attention.norms and replace(attention.norms, q_HD=norms[0], k_KD=norms[1]),
    )


def with_output(attention: AnyAttention, o_MC: Real) -> AnyAttention:
    """Return the attention with another output projection."""
    return replace(attention, o_HMD=np.ascontiguousarray(split_heads(o_MC, len(attention.o_HMD))))


def original_output(layer: Layer, windows: list[int]) -> Tensor:
    """Return the original layer's attention output without the output projection's bias, [B, T, M].

    Reads the file that `Layer.run` writes, so call that first.
    """
    whole_BTM, bias_M = layer.on_device(layer.attended_NTM[windows]), layer.runnable.output_bias
    return whole_BTM if bias_M is None else whole_BTM - bias_M


def outputs(layer: Layer, weights: Weights | LatentWeights, windows: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each window the merged heads' outputs, [T, H·D], and the original layer's output, [T, M]."""
    weights = weights.to(layer.runnable.device)
    for batch in layer.windows.batches(list(windows)):
        yield from zip(heads_out(layer, weights, layer.inputs(batch)), original_output(layer, batch), strict=True)


def heads_out(layer: Layer, weights: Weights | LatentWeights, x_BTM: Tensor) -> Tensor:
    """Return the heads' outputs before the output projection, [B, T, H·D], with other weights than the layer's own."""
    return weights.heads_out(x_BTM) if isinstance(weights, LatentWeights) else layer.runnable.heads_out(weights, x_BTM)


def squared_error(layer: Layer, weights: Weights | LatentWeights, windows: Iterable[int]) -> float:
    """Return the squared output error of a merged layer, summed over windows."""
    total, weights = 0.0, weights.to(layer.runnable.device)
    for batch in layer.windows.batches(list(windows)):
        out_BTM = heads_out(layer, weights, layer.inputs(batch)) @ weights.o_MC.T
        total += float(to_float64(original_output(layer, batch) - out_BTM).square().sum())
    return total
