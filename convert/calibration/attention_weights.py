"""Copy a layer's attention from float64 arrays to float32 tensors, which run, and back.

`HeadWeights` are the tensors of `LayerAttention`, `LatentWeights` those of `LatentMatrices`. Letters: H query heads, D
head_dim, C = heads · D, F pairs of rotated dimensions, X inputs (the hidden size, and a constant 1 where there are
biases), M outputs.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from convert.calibration.latent_weights import LatentWeights
from convert.latent.matrices import LatentMatrices
from convert.layers.runnable_layer import HeadWeights
from convert.merging.weights import LayerAttention, Real, join_heads, split_heads

AnyAttention = TypeVar("AnyAttention", LayerAttention, LatentMatrices)
AnyWeights = TypeVar("AnyWeights", HeadWeights, LatentWeights)


def head_weights(attention: LayerAttention) -> HeadWeights:
    """Copy a layer's attention to float32, on the CPU."""
    q_HDX, k_KDX = attention.projections
    return HeadWeights(
        q_CX=_to_float32(_join_rows(q_HDX)),
        k_CX=_to_float32(_join_rows(k_KDX)),
        v_CX=_to_float32(_join_rows(attention.v_KDX)),
        o_MC=_to_float32(join_heads(attention.o_HMD)),
        q_norm_HD=_to_float32(attention.norms.q_HD) if attention.norms else None,
        k_norm_KD=_to_float32(attention.norms.k_KD) if attention.norms else None,
    )


def with_head_weights(attention: LayerAttention, weights: HeadWeights) -> LayerAttention:
    """Return the attention with other values, in float64."""
    q_CX, k_CX, v_CX, o_MC, *norms = map(_to_float64, weights)
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


def latent_weights(attention: LatentMatrices, frequencies_F: Real) -> LatentWeights:
    """Copy a layer's latent attention to float32, on the CPU. `frequencies_F`: of its rotated dimensions."""
    return LatentWeights(
        q_nope_CX=_to_float32(_join_rows(attention.q_HNX)),
        q_rope_CX=_to_float32(_join_rows(attention.q_HRX)),
        latent_LX=_to_float32(attention.latent_LX),
        key_RX=_to_float32(attention.key_RX),
        k_CL=_to_float32(_join_rows(attention.k_HNL)),
        v_CL=_to_float32(_join_rows(attention.v_HDL)),
        o_MC=_to_float32(join_heads(attention.o_HMD)),
        frequencies_F=_to_float32(frequencies_F),
        head_dim=attention.v_HDL.shape[1],
    )


def with_latent_weights(attention: LatentMatrices, weights: LatentWeights) -> LatentMatrices:
    """Return the attention with other values, in float64."""
    q_nope_CX, q_rope_CX, latent_LX, key_RX, k_CL, v_CL, o_MC = map(_to_float64, weights)
    return replace(
        with_output(attention, o_MC),
        q_HNX=q_nope_CX.reshape(attention.q_HNX.shape),
        q_HRX=q_rope_CX.reshape(attention.q_HRX.shape),
        latent_LX=latent_LX,
        key_RX=key_RX,
        k_HNL=k_CL.reshape(attention.k_HNL.shape),
        v_HDL=v_CL.reshape(attention.v_HDL.shape),
    )


def with_output(attention: AnyAttention, o_MC: Real) -> AnyAttention:
    """Return the attention with another output projection."""
    return replace(attention, o_HMD=np.ascontiguousarray(split_heads(o_MC, len(attention.o_HMD))))


def _join_rows(heads_HDX: Real) -> Real:
    """Return a projection as one matrix, [C, X]."""
    return heads_HDX.reshape(-1, heads_HDX.shape[2])


def _to_float32(matrix: Real) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(matrix)).float()


def _to_float64(matrix: Tensor) -> Real:
    return np.asarray(matrix.detach().cpu().double().numpy())
