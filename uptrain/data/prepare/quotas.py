"""How many tokens are wanted of which units: the first N in order, or each source's share of a mixture.

A *lane* is a row of units that has to bring a number of tokens: all units, or, in a mixture, those of one source.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from model.common.errors import InputError
from uptrain.data.prepare.sources import Source
from uptrain.data.prepare.work_units import Unit, UnitRecord

Records = Mapping[int, UnitRecord]
"""What is finished, by the units' numbers."""


@dataclass(frozen=True)
class MachineShard:
    """Which part of the work this machine does: every n-th unit."""

    number: int = 1
    of: int = 1

    def has(self, unit: Unit) -> bool:
        return unit.number % self.of == self.number - 1


@dataclass(frozen=True)
class SourceQuota:
    """Units whose first `quota` tokens are wanted, or all of them if that is None."""

    name: str
    units: list[Unit]
    quota: int | None
    weight: Fraction
    """Its part of all tokens; the weights of all lanes sum to 1."""

    def found(self, records: Records) -> int:
        return sum(records[unit.number].n_tokens for unit in self.units if unit.number in records)

    def is_filled(self, records: Records, share: MachineShard) -> bool:
        """Whether the units that are finished without a gap bring the quota.

        Units that other machines work on are taken to have as many tokens a byte as those that are finished here.
        """
        if self.quota is None:
            return False
        n_bytes = sum(unit.nbytes for unit in self.units if unit.number in records)
        per_byte = self.found(records) / max(n_bytes, 1)
        tokens = 0.0
        for unit in self.units:
            if unit.number not in records and share.has(unit):
                break
            tokens += records[unit.number].n_tokens if unit.number in records else per_byte * unit.nbytes
        return tokens >= self.quota

    def prefix(self, records: Records) -> Iterator[int]:
        """Yield the numbers of the first units, as far as all are finished and needed."""
        tokens = 0
        for unit in self.units:
            if unit.number not in records or (self.quota is not None and tokens >= self.quota):
                return
            tokens += records[unit.number].n_tokens
            yield unit.number

    def taken(self, records: Records) -> Iterator[tuple[Unit, int]]:
        """Yield the units that are needed, and how many of their tokens: all, but for the last."""
        left = self.found(records) if self.quota is None else self.quota
        for unit in self.units:
            if left == 0:
                return
            n = min(left, records[unit.number].n_tokens)
            left -= n
            yield unit, n


def make_lanes(sources: list[Source], units: list[Unit], n_tokens: int | None) -> list[SourceQuota]:
    """Return the lanes in order. A mixture of all there is has no quotas yet: see `finalise_quotas`."""
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return [SourceQuota("the sources", units, n_tokens, Fraction(1))]
    parts = [weight / sum(weights) for weight in weights]
    quotas = [None] * len(parts) if n_tokens is None else divide(n_tokens, parts)
    return [
        SourceQuota(f"--data {source.name}", [unit for unit in units if unit.source == i], quotas[i], parts[i])
        for i, source in enumerate(sources)
    ]


def divide(n: int, parts: list[Fraction]) -> list[int]:
    """Divide a whole number in proportion: by largest remainders, so that it is divided exactly."""
    shares = [n * part for part in parts]
    whole = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: whole[i] - shares[i])
    for i in by_remainder[: n - sum(whole)]:
        whole[i] += 1
    return whole


def finalise_quotas(lanes: list[SourceQuota], n_tokens: int | None, records: Records) -> list[SourceQuota]:
    """Return the lanes with their final quotas, once all needed units are finished.

    Without a number of tokens a mixture is the largest one that every source has enough for. Raises InputError where a
    source has too little.
    """
    if n_tokens is None and len(lanes) > 1:
        n_tokens = min(_largest(lane, records) for lane in lanes)
        quotas = divide(n_tokens, [lane.weight for lane in lanes])
        lanes = [replace(lane, quota=quota) for lane, quota in zip(lanes, quotas, strict=True)]
    for lane in lanes:
        _check_enough(lane, n_tokens, records)
    return lanes


def _largest(lane: SourceQuota, records: Records) -> int:
    """Return the largest number of tokens in all of which this lane has enough for its part."""
    return math.floor(lane.found(records) / lane.weight)


def _check_enough(lane: SourceQuota, n_tokens: int | None, records: Records) -> None:
    found = lane.found(records)
    if found == 0:
        raise InputError(f"{lane.name}: no tokens in it; every record was dropped, or there were none.")
    if lane.quota is None or found >= lane.quota:
        return
    if lane.weight == 1:
        raise InputError(
            f"{lane.name} have {found:,} tokens, fewer than --tokens {n_tokens:,}; add --data or lower it."
        )
    raise InputError(
        f"{lane.name} has {found:,} tokens, fewer than its {float(lane.weight):.4g} of --tokens {n_tokens:,}, which is "
        f"{lane.quota:,}; lower --tokens to {_largest(lane, records):,} or less, or its weight."
    )
