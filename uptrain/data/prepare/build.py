"""Tokenise all needed work units that are not finished."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from model.common import console
from model.common.errors import InputError
from model.files.staging import Staging
from uptrain.data.prepare import journal
from uptrain.data.prepare.quotas import SourceQuota
from uptrain.data.prepare.tokenise import stop_message
from uptrain.data.prepare.work_units import Unit, UnitRecord
from uptrain.data.prepare.workers import Pool, tokenise_unit
from uptrain.machine_shards import MachineShard

SKIPPED_SHARE = 0.001
"""Largest share of bad records that may be skipped."""
SKIPPED_RECORDS = 100_000
"""Number of records after which SKIPPED_SHARE is checked during the build; otherwise at its end."""


@dataclass
class CacheBuild:
    """Build of a token cache: tokenise work units in a pool, and record the finished ones."""

    source_quotas: list[SourceQuota]
    machine_shard: MachineShard
    staging: Staging
    pool: Pool
    skip_bad: bool
    records: dict[int, UnitRecord]
    """Finished work units by number."""
    _failed: dict[int, InputError] = field(default_factory=dict)

    def run(self, quiet: bool) -> None:
        """Tokenise all needed units. Raises InputError for the first needed unit that fails, and OSError."""
        self._check()
        quotas = [source_quota.quota for source_quota in self.source_quotas if source_quota.quota is not None]
        by_tokens = len(quotas) == len(self.source_quotas)
        total = sum(quotas) / self.machine_shard.of if by_tokens else sum(unit.nbytes for unit in self._own())
        with console.progress_bar("Tokenising", total, quiet, "tokens" if by_tokens else "bytes") as advance:
            for unit in self._own():
                if unit.number in self.records:
                    advance(self.records[unit.number].n_tokens if by_tokens else unit.nbytes)

            def count(n_read: int, n_written: int) -> None:
                advance(n_written if by_tokens else n_read)

            for unit, future in self.pool.run(tokenise_unit, self._wanted(), count):
                error = future.exception()
                if isinstance(error, InputError):
                    self._failed[unit.number] = error
                else:
                    self.records[unit.number] = future.result()
                    journal.record(self.staging, unit, self.records[unit.number])
                self._check()

    def _own(self) -> Iterator[Unit]:
        return (
            unit
            for source_quota in self.source_quotas
            for unit in source_quota.units
            if self.machine_shard.has(unit.number)
        )

    def _wanted(self) -> Iterator[Unit]:
        """Yield the next needed unit, given those finished when it is requested."""
        for source_quota in self.source_quotas:
            for unit in source_quota.units:
                if not self.machine_shard.has(unit.number) or unit.number in self.records:
                    continue
                if source_quota.is_filled(self.records, self.machine_shard):
                    break
                yield unit

    def _check(self) -> None:
        """Raise InputError for errors that do not depend on unfinished units."""
        for source_quota in self.source_quotas:
            finished = source_quota.prefix(self.records, self.machine_shard)
            check_bad((self.records[number] for number in finished), self.skip_bad)
            failure = self._first_failure(source_quota)
            if failure is not None:
                raise failure

    def _first_failure(self, source_quota: SourceQuota) -> InputError | None:
        """Return the error of the first failed unit that is certain to be needed, if any.

        A failed unit beyond the quota is no error: with fewer workers it might not have been read. So with a quota the
        search ends at the first unfinished unit.
        """
        if source_quota.is_filled(self.records, self.machine_shard):
            return None
        for unit in source_quota.units:
            if unit.number in self._failed:
                return self._failed[unit.number]
            is_unfinished = self.machine_shard.has(unit.number) and unit.number not in self.records
            if is_unfinished and source_quota.quota is not None:
                return None
        return None


def check_bad(records: Iterable[UnitRecord], skip_bad: bool, at_end: bool = False) -> None:
    """Raise InputError if the units have bad records and `skip_bad` is false, or more than SKIPPED_SHARE."""
    n_records = skipped = 0
    first = ""
    for unit_record in records:
        n_records, skipped = n_records + unit_record.n_records, skipped + unit_record.skipped
        first = first or unit_record.first_bad
        if skipped and not skip_bad:
            raise InputError(stop_message(first))
        if n_records >= SKIPPED_RECORDS:
            _check_share(skipped, n_records, first)
    if at_end:
        _check_share(skipped, n_records, first)


def _check_share(skipped: int, n_records: int, first: str) -> None:
    if skipped > SKIPPED_SHARE * n_records:
        raise InputError(
            f"{skipped:,} of {n_records:,} records are bad, more than the {SKIPPED_SHARE:.1%} that may be skipped; "
            f"the first is {first}."
        )
