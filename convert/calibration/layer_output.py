"""Run a merged layer's attention on a text, and measure its output error against the original layer.

Letters: B windows in a batch, T tokens, M hidden size, H query heads, G key/value heads, D head_dim, C = heads · D, X
inputs (the hidden size, and a constant 1 where there are biases).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convert.calibration.layer_stream import Layer
from convert.merging.weights import LayerAttention, Real
from model.decoder.attention import attend
from model.decoder.rope import rotate


@dataclass(frozen=True)
class Weights:
    """A layer's attention as float32 matrices."""

    q_CX: Tensor
    k_CX: Tensor
    v_CX: Tensor
    o_MC: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.q_CX, self.k_CX, self.v_CX, self.o_MC))


def weights_of(attention: LayerAttention) -> Weights:
    """Copy a layer's attention to float32."""
    rows = [heads.reshape(-1, heads.shape[2]) for heads in (attention.q_HDX, attention.k_KDX, attention.v_KDX)]
    return Weights(*(torch.from_numpy(matrix).float() for matrix in (*rows, output_matrix(attention))))


def with_weights(attention: LayerAttention, weights: Weights) -> LayerAttention:
    """Return the attention with other values, in float64."""
    q_CX, k_CX, v_CX, o_MC = (matrix.detach().double().numpy() for matrix in weights)
    return replace(
        with_output(attention, o_MC),
        q_HDX=q_CX.reshape(attention.q_HDX.shape),
        k_KDX=k_CX.reshape(attention.k_KDX.shape),
        v_KDX=v_CX.reshape(attention.v_KDX.shape),
    )


def output_matrix(attention: LayerAttention) -> Real:
    """Return the output projection, [M, H·D]."""
    o_MC: Real = attention.o_HMD.transpose(1, 0, 2).reshape(attention.o_HMD.shape[1], -1)
    return o_MC


def with_output(attention: LayerAttention, o_MC: Real) -> LayerAttention:
    """Return the attention with another output projection."""
    n_heads, n_outputs, size = attention.o_HMD.shape
    return replace(attention, o_HMD=np.ascontiguousarray(o_MC.reshape(n_outputs, n_heads, size).transpose(1, 0, 2)))


def heads_out(layer: Layer, weights: Weights, x_BTM: Tensor) -> Tensor:
    """Return the heads' outputs before the output projection, [B, T, H·D]."""
    head_dim = layer.text.config.head_dim
    rows = (weights.q_CX, weights.k_CX, weights.v_CX)
    q_BTHD, k_BTGD, v_BTGD = (_project(x_BTM, rows_CX, head_dim) for rows_CX in rows)
    q_BTHD, k_BTGD = (rotate(heads, *layer.text.rotation) for heads in (q_BTHD, k_BTGD))
    return attend(q_BTHD, k_BTGD, v_BTGD, layer.text.mask(layer.index, len(x_BTM))).flatten(2)


def _project(x_BTM: Tensor, rows_CX: Tensor, head_dim: int) -> Tensor:
    weight_CM, bias_C = rows_CX[:, : x_BTM.shape[2]], rows_CX[:, x_BTM.shape[2] :].flatten()
    heads_BTC: Tensor = F.linear(x_BTM, weight_CM, bias_C if len(bias_C) else None)
    return heads_BTC.view(*x_BTM.shape[:2], -1, head_dim)


def parents_output(layer: Layer, windows: list[int]) -> Tensor:
    """Return the original layer's attention output without the output projection's bias, [B, T, M].

    Reads the file that `Layer.attend` writes, so call that first.
    """
    whole_BTM, bias_M = torch.from_numpy(layer.attended_NTM[windows]), layer.block.self_attn.o_proj.bias
    return whole_BTM if bias_M is None else whole_BTM - bias_M


def outputs(layer: Layer, merged: LayerAttention, windows: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each window the merged heads' outputs, [T, H·D], and the original layer's output, [T, M]."""
    weights = weights_of(merged)
    for batch in layer.text.batches(list(windows)):
        yield from zip(heads_out(layer, weights, layer.inputs(batch)), parents_output(layer, batch), strict=True)


def squared_error(layer: Layer, weights: Weights, windows: Iterable[int]) -> float:
    """Return the squared output error of a merged layer, summed over windows."""
    total = 0.0
    for batch in layer.text.batches(list(windows)):
        out_BTM = heads_out(layer, weights, layer.inputs(batch)) @ weights.o_MC.T
        total += float((parents_output(layer, batch) - out_BTM).double().square().sum())
    return total
