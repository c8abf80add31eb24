"""The order of windows: every window once an epoch, and a pure function of seed and step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uptrain.data.order import permute, windows_of_step


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_permutation_visits_everything_once(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


@given(n=st.integers(1, 150), batch=st.integers(1, 64), seed=st.integers(0, 1000))
def test_epochs_follow_one_another_across_steps(n, batch, seed):
    steps = -(-3 * n // batch)
    seen = np.concatenate([windows_of_step(step, n, batch, seed) for step in range(steps)])
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_differ_and_neither_is_sorted():
    orders = [permute(np.arange(1000), 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for i, order in enumerate(orders):
        assert np.corrcoef(order, np.arange(1000))[0, 1] < 0.2
        for other in orders[:i]:
            assert (order == other).mean() < 0.02


def test_neighbours_are_spread():
    """A shuffle by blocks would keep differences of neighbours small."""
    order = permute(np.arange(100_000), 100_000, 0, 0)
    assert np.abs(np.diff(order)).mean() == pytest.approx(100_000 / 3, rel=0.02)


def test_far_steps_need_no_search():
    far = windows_of_step(10**9, 10**7, 512, 3)
    assert len(set(far)) == 512
    assert far.max() < 10**7
