"""Write latent attention as the tensors of transformers' DeepseekV3Attention, whose norm of the latent is undone.

All stock classes divide the latent by its root mean square. Two ways make that a division by a constant, which the
norm's weight γ takes back:

- `eps`: the latent's rows are scaled by s = 2^-30. Its mean square, m s², is then far below the norm's epsilon, and the
  norm divides by √epsilon. γ = √epsilon / s. The relative error is m s² / (2 epsilon): 5e-13 for m = 1. It needs a
  dtype with the range of float32, and an engine that uses this epsilon.
- `bias`: the bias of the latent's last channel makes it β = 4096. The norm divides by √(β² / L + epsilon) but for a
  relative error of m L / (2 β²). γ takes that back. It needs an engine that reads the bias, and costs one channel.

Letters: H query heads, N unrotated dimensions of a query head, R rotated ones, Q = N + R, L dimensions of the
latent, D dimensions of a value head, U = N + D, X inputs (the hidden size), M outputs.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convert.latent.matrices import LatentMatrices
from convert.latent.sizes import LatentSizes
from convert.layer_tensors.head_matrices import Real, half_split_order, join_heads, split_heads
from convert.layer_tensors.rounding import BFLOAT16, round_once
from model.checkpoint.latent_norm import KV_A, KV_A_NORM, KV_B, LATENT_CONSTANT, LATENT_SHRINK, norm_weight

_PARTS = ("q_proj", KV_A, KV_A_NORM, KV_B, "o_proj")


@dataclass(frozen=True)
class StockNames:
    """The names of the tensors of one attention module."""

    prefix: str
    """The beginning of the names, such as `model.layers.0.self_attn.`."""
    has_bias: bool

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}{part}.weight" for part in _PARTS)

    @property
    def biases(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}{part}.bias" for part in (KV_A, "o_proj")) if self.has_bias else ()

    def shapes(self, sizes: LatentSizes) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, by name."""
        heads, hidden = sizes.n_heads, sizes.hidden_size
        shapes: tuple[tuple[int, ...], ...] = (
            (heads * sizes.qk_head_dim, hidden),
            (sizes.cached, hidden),
            (sizes.kv_lora_rank,),
            (heads * (sizes.qk_nope_head_dim + sizes.head_dim), sizes.kv_lora_rank),
            (hidden, heads * sizes.head_dim),
            (sizes.cached,),
            (hidden,),
        )
        return dict(zip((*self.weights, *self.biases), shapes, strict=False))


def to_stock_tensors(
    attention: LatentMatrices, sizes: LatentSizes, names: StockNames, scale: float
) -> dict[str, Real]:  # fmt: skip
    """Return the tensors of the stock class in float64, to be rounded.

    `scale`: factor of the output. γ is rounded here, and the projection after it divided by the error.
    """
    interleaved = np.argsort(_half_split_order(sizes))
    query_HQX = np.concatenate([attention.q_HNX, attention.q_HRX.take(interleaved, axis=1)], axis=1)
    query_HQX = query_HQX * math.sqrt(sizes.qk_head_dim / sizes.head_dim)  # the class divides logits by its size's root
    exact_weight = norm_weight(sizes.norm, sizes.kv_lora_rank)
    rows = attention.latent_LX * (LATENT_SHRINK if sizes.norm == "eps" else 1.0)
    rounded = rounded_weight(sizes)
    up_HUL = np.concatenate([attention.k_HNL, attention.v_HDL], axis=1) * (exact_weight / rounded)
    key_RX = attention.key_RX.take(interleaved, axis=0)
    if sizes.norm == "bias":
        rows, up_HUL = np.pad(rows, ((0, 1), (0, 0))), np.pad(up_HUL, ((0, 0), (0, 0), (0, 1)))
    latent_bias = np.zeros(sizes.cached)
    latent_bias[sizes.latent_dim : sizes.kv_lora_rank] = LATENT_CONSTANT
    tensors = (
        query_HQX.reshape(-1, sizes.hidden_size),
        np.concatenate([rows, key_RX]),
        np.full(sizes.kv_lora_rank, rounded),
        up_HUL.reshape(-1, sizes.kv_lora_rank),
        join_heads(attention.o_HMD) * scale,
        latent_bias,
        np.zeros(sizes.hidden_size),
    )
    return dict(zip((*names.weights, *names.biases), tensors, strict=False))


def from_stock_tensors(tensors: dict[str, Real], sizes: LatentSizes, names: StockNames, scale: float) -> LatentMatrices:
    """Return the latent attention that `to_stock_tensors` wrote, without its norm."""
    query, rows, gamma, up, output = (tensors[name] for name in names.weights)
    query_HQX = query.reshape(sizes.n_heads, sizes.qk_head_dim, -1) / math.sqrt(sizes.qk_head_dim / sizes.head_dim)
    gain_L = gamma[: sizes.latent_dim] / norm_weight(sizes.norm, sizes.kv_lora_rank)
    up_HUL = up.reshape(sizes.n_heads, -1, sizes.kv_lora_rank)[:, :, : sizes.latent_dim] * gain_L
    latent_LX = rows[: sizes.latent_dim] / (LATENT_SHRINK if sizes.norm == "eps" else 1.0)
    half_split = _half_split_order(sizes)
    return LatentMatrices(
        q_HNX=query_HQX[:, : sizes.qk_nope_head_dim],
        q_HRX=query_HQX[:, sizes.qk_nope_head_dim :].take(half_split, axis=1),
        latent_LX=latent_LX,
        key_RX=rows[sizes.kv_lora_rank :].take(half_split, axis=0),
        k_HNL=up_HUL[:, : sizes.qk_nope_head_dim],
        v_HDL=up_HUL[:, sizes.qk_nope_head_dim :],
        o_HMD=split_heads(output, sizes.n_heads) / scale,
    )


def rounded_weight(sizes: LatentSizes) -> float:
    """Return the norm's weight as bfloat16 holds it. Every dtype holds it, so saving the model again keeps it."""
    return float(round_once(np.array([norm_weight(sizes.norm, sizes.kv_lora_rank)]), BFLOAT16).astype(np.float64)[0])


def _half_split_order(sizes: LatentSizes) -> NDArray[np.intp]:
    """Return the order that puts rotated dimensions 2i and 2i + 1 of the stock class at i and i + R/2."""
    return half_split_order(sizes.qk_rope_head_dim, sizes.qk_rope_head_dim // 2, "interleaved")
