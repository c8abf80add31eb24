"""Compute rotary position embeddings (Su et al. 2021).

Scalings: those of Llama 1 to 3, and LongRoPE with one list of factors (latent attention).

Letters: B batch, T tokens, H heads, D head_dim, R rotated dimensions if not all are; F = D/2 frequencies. Dimensions d
and d + D/2 of a head form a pair (Hugging Face's half-split layout). Pair f of a token at position p is rotated by the
angle p · frequency_f.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.decoder.rope_settings import Rope


def inverse_frequencies(rope: Rope, lengths_BT: Tensor | None = None) -> tuple[Tensor, float]:
    """Return the frequencies in float32, and the factor on cosines and sines.

    Frequencies are [F], for `dynamic` [B, T, F]: these depend on the length of each token's text, `lengths_BT`, which
    the other types ignore. Sources: linear, Chen et al. 2023; dynamic NTK, bloc97 and emozilla 2023; yarn, Peng
    et al. 2023; llama3, Meta's `llama-models`, `apply_scaling`; longrope, Ding et al. 2024.
    """
    dims_F = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    if rope.kind == "linear":
        return 1.0 / rope.theta**dims_F / rope.scaling["factor"], 1.0
    if rope.kind == "dynamic":
        assert lengths_BT is not None, "dynamic frequencies depend on the texts' lengths"
        return _dynamic(rope, dims_F.to(lengths_BT.device), lengths_BT), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dims_F)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.scaling["short_factor"]) * rope.theta**dims_F), rope.scaling["attention_factor"]
    plain_F = 1.0 / rope.theta**dims_F
    return (_llama3(rope, plain_F), 1.0) if rope.kind == "llama3" else (plain_F, 1.0)


def _dynamic(rope: Rope, dims_F: Tensor, lengths_BT: Tensor) -> Tensor:
    """Lower the frequencies of texts longer than the original context; shorter texts keep the unscaled ones."""
    beyond_BT = (lengths_BT - rope.max_positions).clamp(min=0) / rope.max_positions
    stretch_BT = (1 + rope.scaling["factor"] * beyond_BT) ** (rope.head_dim / (rope.head_dim - 2))
    frequencies_BTF: Tensor = 1.0 / (rope.theta * stretch_BT[..., None]) ** dims_F
    return frequencies_BTF


def _llama3(rope: Rope, plain_F: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between."""
    scaling = rope.scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations_F = scaling["original_max_position_embeddings"] * plain_F / (2 * math.pi)  # in the original context
    keep_F = ((rotations_F - low) / (high - low)).clamp(0, 1)
    scaled_F: Tensor = (1 - keep_F) * plain_F / scaling["factor"] + keep_F * plain_F
    return scaled_F


def _yarn(rope: Rope, dims_F: Tensor) -> tuple[Tensor, float]:
    """Interpolate pairs with less than `beta_slow` rotations in the original context; keep those above `beta_fast`."""
    scaling, head_dim = rope.scaling, rope.head_dim
    factor, context = scaling["factor"], scaling.get("original_max_position_embeddings") or rope.max_positions

    def pair_that_rotates(n_times: float) -> float:
        return head_dim * math.log(context / (n_times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_rotates(scaling.get("beta_fast") or 32), pair_that_rotates(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # no division by zero
    interpolate_F = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    plain_F = 1.0 / rope.theta**dims_F
    return plain_F / factor * interpolate_F + plain_F * (1 - interpolate_F), _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def rotations(rope: Rope, positions_BT: Tensor, lengths_BT: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, T, 1, D] for these positions, computed in float32 and returned in `dtype`.

    `lengths_BT`: the length so far of each token's text (B or T is 1 if all are equal); None if `rope` does not
    depend on it (`needs_lengths`). With `dynamic`, new tokens beyond the original context are rotated by lower
    frequencies than the old tokens. Keys in a KV cache are not rotated again, as in transformers.
    """
    frequencies, scale = inverse_frequencies(rope, lengths_BT)
    if positions_BT.is_cuda and frequencies.is_cpu and not torch.compiler.is_compiling():
        frequencies = frequencies.pin_memory()  # a copy from other memory would wait for all queued work
    frequencies = frequencies.to(positions_BT.device, non_blocking=positions_BT.is_cuda)
    cos_BT1D, sin_BT1D = (x[:, :, None] for x in cos_sin(positions_BT[..., None].float() * frequencies))
    return (cos_BT1D * scale).to(dtype), (sin_BT1D * scale).to(dtype)


def cos_sin(angles_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [..., D], of the angles of RoPE pairs, [..., D/2]: each for both dimensions."""
    angles_D = torch.cat((angles_F, angles_F), dim=-1)
    return angles_D.cos(), angles_D.sin()


def rotate(x_BTHD: Tensor, cos_BT1D: Tensor, sin_BT1D: Tensor) -> Tensor:
    """Rotate every pair of every head by its token's angles. The result has x's dtype.

    Under autocast the angles are float32 and x is not, but flash attention needs queries, keys and values in one dtype.
    """
    half = x_BTHD.shape[-1] // 2
    rotated_BTHD = torch.cat((-x_BTHD[..., half:], x_BTHD[..., :half]), dim=-1)  # by 90°
    return (x_BTHD * cos_BT1D + rotated_BTHD * sin_BT1D).to(x_BTHD.dtype)


def rotate_first(heads_D: Tensor, cos_R: Tensor, sin_R: Tensor) -> Tensor:
    """Rotate the first R dimensions of heads [..., D]."""
    size = cos_R.shape[-1]
    if size == heads_D.shape[-1]:
        return rotate(heads_D, cos_R, sin_R)
    return torch.cat([rotate(heads_D[..., :size], cos_R, sin_R), heads_D[..., size:]], dim=-1)
