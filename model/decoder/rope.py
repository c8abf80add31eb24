"""Compute rotary position embeddings (Su et al. 2021), with every scaling of Llama 1, 2 and 3 checkpoints.

Letters: B batch, T tokens, H heads, D head_dim; F = D/2 frequencies. Dimensions d and d + D/2 of a head form a pair
(Hugging Face's half-split layout). Pair f of a token at position p is rotated by the angle p · frequency_f.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.common import checks
from model.common.errors import CheckpointError

Check = Callable[[object, str], Any]
_above_0: Check = partial(checks.number, above=0.0)

SCALINGS: Mapping[str, tuple[Mapping[str, Check], Mapping[str, Check]]] = {
    "default": ({}, {}),
    "linear": ({"factor": _above_0}, {}),
    "dynamic": ({"factor": _above_0}, {}),
    "yarn": (
        {"factor": _above_0},
        {
            "original_max_position_embeddings": checks.whole_number, "attention_factor": checks.number,
            "beta_fast": _above_0, "beta_slow": _above_0, "mscale": checks.number, "mscale_all_dim": checks.number,
            "truncate": checks.flag,
        },
    ),
    "llama3": (
        {
            "factor": _above_0, "low_freq_factor": _above_0, "high_freq_factor": _above_0,
            "original_max_position_embeddings": checks.whole_number,
        },
        {},
    ),
    "longrope": (
        {"short_factor": checks.numbers, "long_factor": checks.numbers, "attention_factor": checks.number},
        {"original_max_position_embeddings": checks.whole_number},
    ),
}  # fmt: skip
"""Implemented type → its required and its optional parameters, each with its check."""


@dataclass(frozen=True)
class Rope:
    """A checkpoint's rotary embedding: its type, its base θ and the parameters of its scaling."""

    kind: str
    theta: float
    head_dim: int
    max_positions: int
    """`max_position_embeddings`: the length from which dynamic scaling applies."""
    scaling: Mapping[str, Any]

    @property
    def needs_lengths(self) -> bool:
        """Whether the angles depend on the length of the text besides the position."""
        return self.kind == "dynamic"


def read_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Read the rotary embedding from `config.json`, in the spelling of transformers 4 or 5.

    Version 4: `rope_theta`, and `rope_scaling` with `rope_type` (older: `type`); version 5: all in `rope_parameters`.
    Raises CheckpointError for a type or a partial rotation that is not implemented, and for an impossible value.
    """
    new, old = (checks.table(config.get(key), f"config.json has {key}") for key in ("rope_parameters", "rope_scaling"))
    if new and old and _contradict(new, old):
        raise CheckpointError(
            f"config.json has both rope_parameters ({new}) and rope_scaling ({old}), and programs differ in which they "
            "use; make them equal, or remove one."
        )
    scaling = new or old
    bases = [each for each in (scaling.get("rope_theta"), config.get("rope_theta")) if each is not None]
    if len(bases) == 2 and bases[0] != bases[1]:
        raise CheckpointError(
            f"config.json has rope_theta = {checks.show(config['rope_theta'])}, and another in its rope_parameters "
            f"({checks.show(scaling['rope_theta'])}), and programs differ in which they use; make them equal."
        )
    kind = _kind(scaling)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(
            f"the RoPE type {checks.show(kind)} is not implemented; implemented are: {', '.join(SCALINGS)}."
        )
    partial = _first(scaling.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor = {checks.show(partial)} is not implemented; only a full rotation is."
        )
    theta = _first(scaling.get("rope_theta"), config.get("rope_theta"), 10000.0)
    rope = Rope(
        kind,
        checks.number(theta, "config.json has rope_theta", above=1.0),
        head_dim,
        checks.whole_number(config["max_position_embeddings"], "config.json has max_position_embeddings"),
        _parameters(kind, scaling),
    )
    _check(rope)
    return rope


def _parameters(kind: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked parameters of a type of scaling. Null means absent."""
    needed, optional = SCALINGS[kind]
    for key in needed:
        if scaling.get(key) is None:
            raise CheckpointError(f"config.json asks for RoPE of type {kind}, but gives no {key}.")
    return {
        key: check(scaling[key], f"config.json has RoPE of type {kind} with {key}")
        for key, check in {**needed, **optional}.items()
        if scaling.get(key) is not None
    }


def _check(rope: Rope) -> None:
    """Raise CheckpointError for values for which a formula divides by zero, or a head has no whole pairs."""
    least = 4 if rope.kind == "dynamic" else 2
    if rope.head_dim % 2 or rope.head_dim < least:
        raise CheckpointError(
            f"config.json means heads of {rope.head_dim} numbers; RoPE of type {rope.kind} rotates pairs, and needs an "
            f"even number of at least {least}."
        )
    if rope.kind == "longrope":
        short, long = rope.scaling["short_factor"], rope.scaling["long_factor"]
        if short != long or len(short) != rope.head_dim // 2:
            raise CheckpointError(
                f"config.json has RoPE of type longrope; it is implemented with equal short_factor and long_factor of "
                f"{rope.head_dim // 2} numbers only."
            )
    if rope.kind == "llama3" and rope.scaling["high_freq_factor"] <= rope.scaling["low_freq_factor"]:
        raise CheckpointError(
            f"config.json has high_freq_factor = {rope.scaling['high_freq_factor']:g}, which must be above "
            f"low_freq_factor = {rope.scaling['low_freq_factor']:g}."
        )


def _first(*values: Any) -> Any:
    """Return the first value that is not null."""
    return next(value for value in values if value is not None)


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _contradict(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Return whether the two spellings disagree. (The old one has base and partial rotation under other keys.)"""
    elsewhere = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    rest_of_new, rest_of_old = ({key: each[key] for key in each.keys() - elsewhere} for each in (new, old))
    return bool(_kind(new) != _kind(old) or rest_of_new != rest_of_old)


def inverse_frequencies(rope: Rope, lengths_BT: Tensor | None = None) -> tuple[Tensor, float]:
    """Return the frequencies in float32, and the factor on cosines and sines.

    Frequencies are [F], for `dynamic` [B, T, F]: these depend on the length of each token's text, `lengths_BT`, which
    the other types ignore. Sources: linear, Chen et al. 2023; dynamic NTK, bloc97 and emozilla 2023; yarn, Peng
    et al. 2023; llama3, Meta's `llama-models`, `apply_scaling`.
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
    last += 0.001 * (first == last)
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
    angles_BTF = positions_BT[..., None].float() * frequencies.to(positions_BT.device)
    angles_BT1D = torch.cat((angles_BTF, angles_BTF), dim=-1)[:, :, None]
    return (angles_BT1D.cos() * scale).to(dtype), (angles_BT1D.sin() * scale).to(dtype)


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
