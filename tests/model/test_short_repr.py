"""How messages show values: as Python does, on one line, cut, and in bounded time and memory."""

import pytest
from limits import bounded

from model.common.checks import short_repr


@pytest.mark.parametrize(
    "value",
    [
        None, True, -7, 1.5, float("nan"), "it's", b"\xff", "a\nb", [], (), (1,), (1, "2"), {}, {"b": [1, {"a": None}]},
        frozenset([1]), [[]], {1: (), "": {}}, 10**58,
    ],
)  # fmt: skip
def test_small_values_are_shown_whole(value):
    assert short_repr(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 61, list(range(99)), {str(i): [i] * i for i in range(30)}, 10**70])
def test_larger_ones_are_cut(value):
    assert short_repr(value) == f"{repr(value)[:60]}…"


def doubled(levels):
    value = []
    for _ in range(levels):
        value = [value, value]
    return value


HUGE = {
    "text": "a" * 10_000_000,
    "list": [0] * 1_000_000,
    "deep": doubled(100_000),
    "number": 1 << 10_000_000,
}


@pytest.mark.parametrize("kind", HUGE)
def test_huge_ones_take_nothing(kind):
    with bounded(1, seconds=1):
        assert len(short_repr(HUGE[kind])) <= 61
