"""Measuring several ways in turns."""

from scripts.bench.rounds import in_turns, median_ratio, medians


def test_each_way_runs_once_in_each_round():
    calls = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    rounds = in_turns(ways, 4, warm_up=2)
    assert len(rounds) == 4
    turns = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [sorted(turn) for turn in turns] == [["a", "b", "c"]] * 6
    assert turns[1::2] == [turn[::-1] for turn in turns[::2]]
    assert rounds == [{name: 3 * i + turn.index(name) + 1 for name in "abc"} for i, turn in enumerate(turns)][2:]


def test_medians():
    """The ratio is the median of the rounds' ratios, and not the ratio of the medians."""
    rounds = [{"a": 1.0, "b": 1.0}, {"a": 6.0, "b": 2.0}, {"a": 5.0, "b": 10.0}]
    assert medians(rounds) == {"a": 5.0, "b": 2.0}
    assert median_ratio(rounds, "a", "b") == 1.0
