"""The arithmetic of mixtures."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from model.texts import Piece
from uptrain.data.prepare.quotas import SourceQuota, apportion, finalise_quotas
from uptrain.data.prepare.work_units import Unit, UnitRecord
from uptrain.machine_shards import MachineShard

PARTS = st.lists(st.fractions(Fraction(1, 1000), 10), min_size=1, max_size=6).map(lambda w: [x / sum(w) for x in w])


@given(st.integers(0, 10**13), PARTS)
def test_division_is_exact_and_fair(n, parts):
    divided = apportion(n, parts)
    assert sum(divided) == n
    assert all(abs(count - n * part) < 1 for count, part in zip(divided, parts, strict=True))


def record(n_tokens):
    return UnitRecord([], n_tokens, 1, 1, {}, 0, "", "", "")


@given(st.data(), PARTS)
def test_the_largest_mixture_uses_up_a_source(data, parts):
    available = [data.draw(st.integers(10**5, 10**7)) for _ in parts]  # so that no share is less than a token
    source_quotas = [SourceQuota("", [Unit(i, i, "txt", ())], None, part) for i, part in enumerate(parts)]
    final = finalise_quotas(source_quotas, None, {i: record(n) for i, n in enumerate(available)})
    quotas = [source_quota.quota if len(parts) > 1 else available[0] for source_quota in final]
    assert all(quota <= n for quota, n in zip(quotas, available, strict=True))
    one_more = sum(quotas) + 1
    assert any(one_more * part > n for part, n in zip(parts, available, strict=True))


def test_a_machine_that_does_a_share_stops_when_its_guess_is_enough():
    source_quota = SourceQuota("", [Unit(i, 0, "txt", (Piece("", 0, 1, 100),)) for i in range(10)], 35, Fraction(1))
    share = MachineShard(2, 2)  # units 1, 3, 5, …
    records = {}
    for number, filled in ((1, False), (3, True)):  # 0 to 3 are taken to have 10 each, then so does 4
        assert not source_quota.is_filled(records, share)
        records[number] = record(10)
        assert source_quota.is_filled(records, share) == filled
    assert not source_quota.is_filled(records, MachineShard())
