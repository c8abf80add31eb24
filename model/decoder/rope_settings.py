"""Read a checkpoint's rotary embedding from `config.json`. Needs no torch.

Scalings: those of Llama 1 to 3, and LongRoPE with one list of factors (latent attention).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from model.common import checks
from model.common.errors import CheckpointError, NotNativeError

Check = Callable[[object, str], Any]
_above_0: Check = partial(checks.number, above=0.0)


def _rotations(value: object, name: str) -> float:
    """Return a number of rotations, of which yarn takes the logarithm."""
    number = checks.number(value, name, above=0.0)
    if not 1e-6 <= number <= 1e6:
        raise CheckpointError(f"{name} = {checks.short_repr(value)}; it must be from 1e-6 to 1e6.")
    return number


SCALINGS: Mapping[str, tuple[Mapping[str, Check], Mapping[str, Check]]] = {
    "default": ({}, {}),
    "linear": ({"factor": _above_0}, {}),
    "dynamic": ({"factor": _above_0}, {}),
    "yarn": (
        {"factor": _above_0},
        {
            "original_max_position_embeddings": checks.whole_number, "attention_factor": checks.number,
            "beta_fast": _rotations, "beta_slow": _rotations, "mscale": checks.number, "mscale_all_dim": checks.number,
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
        {"short_factor": checks.numbers, "long_factor": checks.numbers},
        {"original_max_position_embeddings": checks.whole_number, "attention_factor": checks.number},
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
    spelling, scaling = ("rope_parameters", new) if new else ("rope_scaling", old)
    if nested := [key for key, value in scaling.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"config.json has RoPE settings for {checks.short_repr(nested[0])} alone; settings that differ from layer "
            "to layer are not implemented."
        )
    refuse_two_values(config, "rope_theta", spelling, scaling)
    kind = _kind(scaling)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(
            f"the RoPE type {checks.short_repr(kind)} is not implemented; implemented are: {', '.join(SCALINGS)}."
        )
    rotary_fraction = _first(scaling.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
    if rotary_fraction != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor = {checks.short_repr(rotary_fraction)} is not implemented; only a full rotation is."
        )
    theta = _first(scaling.get("rope_theta"), config.get("rope_theta"), 10000.0)
    rope = Rope(
        kind,
        checks.number(theta, "config.json has rope_theta", above=1.0),
        head_dim,
        checks.whole_number(config.get("max_position_embeddings"), "config.json has max_position_embeddings"),
        _parameters(kind, _with_context(kind, config, spelling, scaling)),
    )
    _check(rope)
    return rope


def refuse_two_values(
    config: Mapping[str, Any], key: str, spelling: str, scaling: Mapping[str, Any], key_inside: str | None = None
) -> None:
    """Raise CheckpointError if a config has two values of a setting: beside its scaling, and inside.

    `key_inside`: the setting's name inside, if it differs.
    """
    outer, inner = config.get(key), scaling.get(key_inside or key)
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(
            f"config.json has {key} = {checks.short_repr(outer)}, and another in its {spelling} "
            f"({checks.short_repr(inner)}), and programs differ in which they use; make them equal."
        )


def _with_context(kind: str, config: Mapping[str, Any], spelling: str, scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scaling with the length of pre-training, which transformers 5 also reads outside it.

    (`modeling_rope_utils.standardize_rope_params`.)
    """
    key = "original_max_position_embeddings"
    if config.get(key) is None or all(key not in known for known in SCALINGS[kind]):
        return scaling
    refuse_two_values(config, key, spelling, scaling)
    return {**scaling, key: config[key]}


def _parameters(kind: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked parameters of a type of scaling. Null means absent."""
    needed, optional = SCALINGS[kind]
    for key in needed:
        if scaling.get(key) is None:
            raise CheckpointError(f"config.json asks for RoPE of type {kind}, but gives no {key}; add it.")
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
            f"config.json implies heads of {rope.head_dim} dimensions; RoPE of type {rope.kind} rotates pairs, and "
            f"needs an even number of at least {least}."
        )
    if rope.kind == "longrope":
        short, long = rope.scaling["short_factor"], rope.scaling["long_factor"]
        if any(len(factors) != rope.head_dim // 2 for factors in (short, long)):
            raise CheckpointError(
                f"config.json has RoPE of type longrope with {len(short)} numbers in short_factor and {len(long)} in "
                f"long_factor; both must have {rope.head_dim // 2}."
            )
        if short != long or "attention_factor" not in rope.scaling:
            raise NotNativeError(
                "RoPE of type longrope is implemented with equal short_factor and long_factor, and with "
                "attention_factor, only."
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
