"""Compute quotas: the number of tokens to take from all units in order, or from each source of a mixture."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from model.common.errors import InputError
from uptrain.data.prepare.sources import Source
from uptrain.data.prepare.work_units import Unit, UnitRecord
from uptrain.machine_shards import MachineShard

Records = Mapping[int, UnitRecord]
"""Finished work units by number."""


@dataclass(frozen=True)
class SourceQuota:
    """Work units, in order, with the number of tokens to take: all units, or those of one source of a mixture."""

    name: str
    units: list[Unit]
    quota: int | None
    """Number of tokens; None takes all."""
    weight: Fraction
    """Fraction of all tokens; the weights of all source quotas sum to 1."""

    def finished_tokens(self, records: Records) -> int:
        """Return the number of tokens in finished units."""
        return sum(records[unit.number].n_tokens for unit in self.units if unit.number in records)

    def is_filled(self, records: Records, machine_shard: MachineShard) -> bool:
        """Return whether contiguous finished units meet the quota.

        Units of other machines count with an estimate: the tokens per byte of the finished units.
        """
        if self.quota is None:
            return False
        n_bytes = sum(unit.nbytes for unit in self.units if unit.number in records)
        tokens_per_byte = self.finished_tokens(records) / max(n_bytes, 1)
        tokens = 0.0
        for unit in self.units:
            if unit.number not in records and machine_shard.has(unit.number):
                break
            tokens += records[unit.number].n_tokens if unit.number in records else tokens_per_byte * unit.nbytes
        return tokens >= self.quota

    def prefix(self, records: Records, machine_shard: MachineShard) -> Iterator[int]:
        """Yield the numbers of the first units of a machine, while they are finished and needed."""
        tokens = 0
        for unit in filter(lambda unit: machine_shard.has(unit.number), self.units):
            if unit.number not in records or (self.quota is not None and tokens >= self.quota):
                return
            tokens += records[unit.number].n_tokens
            yield unit.number

    def taken(self, records: Records) -> Iterator[tuple[Unit, int]]:
        """Yield the needed units, each with the number of tokens to take: all, except from the last.

        Without a quota that is all units, also those without tokens: their records may be bad.
        """
        left = self.finished_tokens(records) if self.quota is None else self.quota
        for unit in self.units:
            if self.quota is not None and left == 0:
                return
            n = min(left, records[unit.number].n_tokens)
            left -= n
            yield unit, n


def make_source_quotas(sources: list[Source], units: list[Unit], n_tokens: int | None) -> list[SourceQuota]:
    """Return the source quotas in order. Without `n_tokens` a mixture has none yet: see `finalise_quotas`."""
    weights = [source.weight for source in sources if source.weight is not None]
    if len(weights) < 2:  # one weight is all of the tokens
        return [SourceQuota("the sources", units, n_tokens, Fraction(1))]
    parts = [weight / sum(weights) for weight in weights]
    quotas = [None] * len(parts) if n_tokens is None else apportion(n_tokens, parts)
    return [
        SourceQuota(f"--data {source.text.name}", [unit for unit in units if unit.source == i], quotas[i], parts[i])
        for i, source in enumerate(sources)
    ]


def apportion(n: int, parts: list[Fraction]) -> list[int]:
    """Divide an integer in proportion to `parts`, exactly, by the method of largest remainders."""
    exact = [n * part for part in parts]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: n - sum(whole)]:
        whole[i] += 1
    return whole


def finalise_quotas(source_quotas: list[SourceQuota], n_tokens: int | None, records: Records) -> list[SourceQuota]:
    """Return the source quotas with their final numbers, once all needed units are finished.

    Without `n_tokens`, a mixture is as large as its sources allow. Raises InputError if a source has too few tokens.
    """
    _check_shares(source_quotas, n_tokens)  # of a source that gives nothing, nothing was tokenised
    for source_quota in source_quotas:
        _check_not_empty(source_quota, records)
    if n_tokens is None and len(source_quotas) > 1:
        n_tokens = min(_largest_mixture(source_quota, records) for source_quota in source_quotas)
        quotas = apportion(n_tokens, [source_quota.weight for source_quota in source_quotas])
        source_quotas = [
            replace(source_quota, quota=quota) for source_quota, quota in zip(source_quotas, quotas, strict=True)
        ]
        _check_shares(source_quotas, n_tokens)
    most = min(_largest_mixture(source_quota, records) for source_quota in source_quotas)
    for source_quota in source_quotas:
        _check_enough(source_quota, n_tokens, records, most)
    return source_quotas


def _largest_mixture(source_quota: SourceQuota, records: Records) -> int:
    """Return the largest total number of tokens of which this source can supply its fraction."""
    return math.floor(source_quota.finished_tokens(records) / source_quota.weight)


def left_out_warning(source_quotas: list[SourceQuota], records: Records) -> str | None:
    """Return a warning if a mixture, which is as large as its sources allow, leaves out a hundredth of the tokens."""
    available = sum(source_quota.finished_tokens(records) for source_quota in source_quotas)
    taken = (each.finished_tokens(records) if each.quota is None else each.quota for each in source_quotas)
    left = available - sum(taken)
    if left < available / 100:
        return None
    first = min(source_quotas, key=lambda source_quota: _largest_mixture(source_quota, records))
    return (
        f"all tokens of {first.name} are taken, and {left:,} of all {available:,} are left out to keep the weights. "
        "With a smaller weight of that source, fewer are left out."
    )


def _why_empty(source_quota: SourceQuota, records: Records) -> str:
    finished = [records[unit.number] for unit in source_quota.units if unit.number in records]
    n_records = sum(record.n_records for record in finished)
    reasons = Counter[str]()
    for record in finished:
        reasons.update({**record.dropped, "bad": record.skipped})
    counts = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items() if n)
    first = next((f"; the first bad one is {record.first_bad}" for record in finished if record.first_bad), "")
    return f"none of {n_records:,} records gave a document ({counts}{first})" if counts else "there are no records"


def _check_not_empty(source_quota: SourceQuota, records: Records) -> None:
    """Raise InputError if a source has no tokens."""
    if source_quota.finished_tokens(records) == 0:
        raise InputError(f"{source_quota.name}: no tokens; {_why_empty(source_quota, records)}.")


def _check_shares(source_quotas: Iterable[SourceQuota], n_tokens: int | None) -> None:
    """Raise InputError if a source's share is less than one token."""
    for source_quota in (each for each in source_quotas if each.quota == 0):
        raise InputError(
            f"{source_quota.name}: its share of {n_tokens:,} tokens is less than one token; raise its weight, or "
            "--tokens."
        )


def _check_enough(source_quota: SourceQuota, n_tokens: int | None, records: Records, most: int) -> None:
    """Raise InputError if a source has fewer tokens than its quota. `most`: the most tokens that all sources allow."""
    available = source_quota.finished_tokens(records)
    if source_quota.quota is None or available >= source_quota.quota:
        return
    if source_quota.weight == 1:
        raise InputError(
            f"{source_quota.name} have {available:,} tokens, fewer than --tokens {n_tokens:,}; add --data or lower "
            "--tokens."
        )
    raise InputError(
        f"{source_quota.name} has {available:,} tokens, fewer than its {float(source_quota.weight):.4g} of "
        f"--tokens {n_tokens:,}, which is {source_quota.quota:,}; lower --tokens to {most:,} or less, or its weight."
    )
