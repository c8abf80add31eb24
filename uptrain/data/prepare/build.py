"""The tokenising of all units that are needed and not finished yet."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from model.common import console
from model.common.errors import InputError
from model.common.staging import Staging
from uptrain.data.prepare import journal
from uptrain.data.prepare.quotas import MachineShard, SourceQuota
from uptrain.data.prepare.tokenise import stop_message
from uptrain.data.prepare.work_units import Unit, UnitRecord
from uptrain.data.prepare.workers import Pool, do_unit

SKIPPED_SHARE = 0.001
"""More bad records than this stop the build even where they are skipped: at its end, or …"""
SKIPPED_RECORDS = 100_000
"""… as soon as so many records were read."""


@dataclass
class TokenizeJob:
    """A build under way."""

    lanes: list[SourceQuota]
    share: MachineShard
    staging: Staging
    pool: Pool
    skip_bad: bool
    records: dict[int, UnitRecord]
    """What is finished, by the units' numbers."""
    _failed: dict[int, InputError] = field(default_factory=dict)

    def run(self, quiet: bool) -> None:
        """Tokenise what is needed. Raises InputError for the first needed unit that fails, and OSError."""
        self._check()
        quotas = [lane.quota for lane in self.lanes if lane.quota is not None]
        by_tokens = len(quotas) == len(self.lanes)
        total = sum(quotas) / self.share.of if by_tokens else sum(unit.nbytes for unit in self._own())
        with console.progress_bar("Tokenising", total, quiet, "tokens" if by_tokens else "bytes") as advance:
            for unit in self._own():
                if unit.number in self.records:
                    advance(self.records[unit.number].n_tokens if by_tokens else unit.nbytes)
            for unit, future in self.pool.run(do_unit, self._wanted(), lambda *n: advance(n[by_tokens])):
                error = future.exception()
                if isinstance(error, InputError):
                    self._failed[unit.number] = error
                else:
                    self.records[unit.number] = future.result()
                    journal.record(self.staging, unit, self.records[unit.number])
                self._check()

    def _own(self) -> Iterator[Unit]:
        return (unit for lane in self.lanes for unit in lane.units if self.share.has(unit))

    def _wanted(self) -> Iterator[Unit]:
        """Yield what to do next, judged by what is finished at that moment."""
        for lane in self.lanes:
            for unit in filter(self.share.has, lane.units):
                if lane.is_filled(self.records, self.share):
                    break
                if unit.number not in self.records:
                    yield unit

    def _check(self) -> None:
        """Raise InputError for what is known to be wrong already, whatever the unfinished units bring.

        A unit that fails beyond the tokens that are wanted is no error: with fewer workers it might not have been read.
        """
        for lane in self.lanes:
            check_bad(map(self.records.__getitem__, lane.prefix(self.records)), self.skip_bad)
            for unit in lane.units:
                if unit.number in self._failed and not lane.is_filled(self.records, self.share):
                    raise self._failed[unit.number]
                if unit.number not in self.records and lane.quota is not None and self.share.has(unit):
                    break


def check_bad(records: Iterable[UnitRecord], skip_bad: bool, at_end: bool = False) -> None:
    """Raise InputError if these units have bad records and none, or not so many, may be skipped."""
    n_records = skipped = 0
    first = ""
    for found in records:
        n_records, skipped = n_records + found.n_records, skipped + found.skipped
        first = first or found.first_bad
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
