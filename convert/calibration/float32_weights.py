"""Copy the matrices of a layer's attention from float64 arrays to float32 tensors, which run, and back.

`HeadWeights` are the tensors of `HeadMatrices`, `LatentWeights` those of `LatentMatrices`. Letters: H query heads, D
head_dim, C = heads · D, P pairs of rotated dimensions, X inputs (the hidden size, and a constant 1 where there are
biases), M outputs.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from convert.calibration.latent_weights import LatentWeights
from convert.latent.latent_conversion import LatentConversion
from convert.latent.matrices import LatentMatrices
from convert.layer_tensors.converted_layer import LayerConversion
from convert.layer_tensors.head_matrices import HeadMatrices, Real, join_heads, split_heads
from convert.layers.runnable_layer import HeadWeights
from convert.merging.layer_merge import LayerMerge, output_attention

AnyMatrices = TypeVar("AnyMatrices", HeadMatrices, LatentMatrices)
AnyWeights = TypeVar("AnyWeights", HeadWeights, LatentWeights)


def head_weights(matrices: HeadMatrices) -> HeadWeights:
    """Copy a layer's matrices to float32, on the CPU."""
    q_HDX, k_KDX = matrices.projections
    return HeadWeights(
        q_CX=_to_float32(_join_rows(q_HDX)),
        k_CX=_to_float32(_join_rows(k_KDX)),
        v_CX=_to_float32(_join_rows(matrices.v_KDX)),
        o_MC=_to_float32(join_heads(matrices.o_HMD)),
        q_norm_HD=_to_float32(matrices.norms.q_HD) if matrices.norms else None,
        k_norm_KD=_to_float32(matrices.norms.k_KD) if matrices.norms else None,
    )


def with_head_weights(matrices: HeadMatrices, weights: HeadWeights) -> HeadMatrices:
    """Return the matrices with other values, in float64."""
    q_CX, k_CX, v_CX, o_MC, *norms = map(_to_float64, weights)
    q_HDX, k_KDX, v_KDX = q_CX.reshape(matrices.q_HDX.shape), k_CX.reshape(matrices.k_KDX.shape), v_CX
    if norms:
        q_HDX, k_KDX = (heads * norm[:, :, None] for heads, norm in zip((q_HDX, k_KDX), norms, strict=True))
    return replace(
        with_output(matrices, o_MC),
        q_HDX=q_HDX,
        k_KDX=k_KDX,
        v_KDX=v_KDX.reshape(matrices.v_KDX.shape),
        norms=matrices.norms and replace(matrices.norms, q_HD=norms[0], k_KD=norms[1]),
    )


def latent_weights(matrices: LatentMatrices, frequencies_P: Real) -> LatentWeights:
    """Copy a layer's latent attention to float32, on the CPU. `frequencies_P`: of its rotated dimensions."""
    return LatentWeights(
        q_nope_CX=_to_float32(_join_rows(matrices.q_HNX)),
        q_rope_CX=_to_float32(_join_rows(matrices.q_HRX)),
        latent_LX=_to_float32(matrices.latent_LX),
        key_RX=_to_float32(matrices.key_RX),
        k_CL=_to_float32(_join_rows(matrices.k_HNL)),
        v_CL=_to_float32(_join_rows(matrices.v_HDL)),
        o_MC=_to_float32(join_heads(matrices.o_HMD)),
        frequencies_P=_to_float32(frequencies_P),
        head_dim=matrices.v_HDL.shape[1],
    )


def with_latent_weights(matrices: LatentMatrices, weights: LatentWeights) -> LatentMatrices:
    """Return the matrices with other values, in float64."""
    q_nope_CX, q_rope_CX, latent_LX, key_RX, k_CL, v_CL, o_MC = map(_to_float64, weights)
    return replace(
        with_output(matrices, o_MC),
        q_HNX=q_nope_CX.reshape(matrices.q_HNX.shape),
        q_HRX=q_rope_CX.reshape(matrices.q_HRX.shape),
        latent_LX=latent_LX,
        key_RX=key_RX,
        k_HNL=k_CL.reshape(matrices.k_HNL.shape),
        v_HDL=v_CL.reshape(matrices.v_HDL.shape),
    )


def converted_weights(conversion: LayerConversion, tensors: dict[str, Real]) -> HeadWeights | LatentWeights:
    """Return the attention of a converted layer, to run it. `tensors`: those of the output, in float64."""
    if isinstance(conversion, LatentConversion):
        return latent_weights(conversion.latent_of(tensors), conversion.target.frequencies_C)
    assert isinstance(conversion, LayerMerge)
    return head_weights(output_attention(tensors, conversion))


def with_output(matrices: AnyMatrices, o_MC: Real) -> AnyMatrices:
    """Return the attention with another output projection."""
    return replace(matrices, o_HMD=np.ascontiguousarray(split_heads(o_MC, len(matrices.o_HMD))))


def _join_rows(heads_HDX: Real) -> Real:
    """Return a projection as one matrix, [C, X]."""
    return heads_HDX.reshape(-1, heads_HDX.shape[2])


def _to_float32(matrix: Real) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(matrix)).float()


def _to_float64(matrix: Tensor) -> Real:
    return np.asarray(matrix.detach().cpu().double().numpy())
