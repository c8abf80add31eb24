"""Spend a number of K/V heads unevenly over layers, where they save most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Chosen = tuple["Chosen", int] | None
"""Groups layer by layer, the last first: what was chosen before, and the last layer's."""


@dataclass(frozen=True)
class Advice:
    """What `groups` in every layer lose, and the same number of K/V heads in all, divided best."""

    groups: int
    uniform_lost: float
    mixed_lost: float
    """Sums over layers, as `uniform_lost` is."""
    mixed: tuple[int, ...]
    """Groups of each layer."""


def advise(lost: Sequence[Mapping[int, float]], groups: Sequence[int]) -> tuple[Advice, ...]:
    """Return for each number of groups the plan of the same size that loses least.

    `lost` has for each layer what each possible number of its groups loses; `groups` are among them in every layer.
    """
    best = _cheapest(lost, max(groups) * len(lost))
    return tuple(_advice(lost, n, best[n * len(lost)][1]) for n in groups)


def _advice(lost: Sequence[Mapping[int, float]], groups: int, chosen: Chosen) -> Advice:
    mixed: list[int] = []
    while chosen is not None:
        chosen, last = chosen
        mixed.insert(0, last)
    uniform_lost = sum(layer[groups] for layer in lost)
    mixed_lost = sum(layer[n] for layer, n in zip(lost, mixed, strict=True))
    if mixed_lost >= uniform_lost:  # as good, but for rounding
        return Advice(groups, uniform_lost, uniform_lost, (groups,) * len(lost))
    return Advice(groups, uniform_lost, mixed_lost, tuple(mixed))


def _cheapest(lost: Sequence[Mapping[int, float]], most: int) -> dict[int, tuple[float, Chosen]]:
    """Return for each number of heads in all, up to `most`, the least loss and how it is reached.

    Exact: what is best for the layers so far depends on the rest only by the number of heads that they leave.
    """
    best: dict[int, tuple[float, Chosen]] = {0: (0.0, None)}
    for layer in lost:
        longer: dict[int, tuple[float, Chosen]] = {}
        for used, (cost, chosen) in best.items():
            for groups, added in layer.items():
                heads = used + groups
                if heads <= most and (heads not in longer or cost + added < longer[heads][0]):
                    longer[heads] = cost + added, (chosen, groups)
        best = longer
    return best
