"""Which heads share a group."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.merging import grouping
from convert.merging.grouping import reorder, similar_order
from convert.merging.moments import moments_from_weights
from convert.merging.weights import LayerAttention

HEAD_DIM, HIDDEN = 4, 48


def attention(rng, n_heads: int, n_keys: int) -> LayerAttention:
    return LayerAttention(
        rng.normal(size=(n_heads, HEAD_DIM, HIDDEN)),
        rng.normal(size=(n_keys, HEAD_DIM, HIDDEN)),
        rng.normal(size=(n_keys, HEAD_DIM, HIDDEN)),
        rng.normal(size=(n_heads, HIDDEN, HEAD_DIM)),
        HEAD_DIM // 2,
    )


def planted(rng, n_keys: int, n_groups: int) -> tuple[LayerAttention, list[int]]:
    """Return heads that are few heads, turned and mixed up, and which of the few each is."""
    few, kinds = attention(rng, n_groups, n_groups), rng.permutation(np.repeat(np.arange(n_groups), n_keys // n_groups))
    z = few.k_KDX[:, :2] + 1j * few.k_KDX[:, 2:]
    z = z[kinds] * np.exp(1j * rng.uniform(0, 6.28, (n_keys, 2, 1)))
    turns = np.linalg.qr(rng.normal(size=(n_keys, HEAD_DIM, HEAD_DIM)))[0]
    many = attention(rng, n_keys, n_keys)
    k = np.concatenate([z.real, z.imag], axis=1)
    return LayerAttention(many.q_HDX, k, turns @ few.v_KDX[kinds], many.o_HMD, 2), list(kinds)


@pytest.mark.parametrize(("n_keys", "n_groups"), [(4, 2), (8, 2), (8, 4), (12, 3), (16, 4), (16, 2), (24, 4), (32, 8)])
def test_finds_heads_that_are_the_same_but_for_their_coordinates(n_keys, n_groups):
    heads, kinds = planted(np.random.default_rng(n_keys), n_keys, n_groups)
    order = similar_order(moments_from_weights(heads), n_groups)
    assert sorted(order) == list(range(n_keys))
    size = n_keys // n_groups
    for start in range(0, n_keys, size):
        assert len({kinds[head] for head in order[start : start + size]}) == 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([2, 3]))
def test_partition_is_optimal(seed, size):
    n = 6
    alike = np.random.default_rng(seed).uniform(size=(n, n))
    alike = alike + alike.T

    def score(order):
        return sum(alike[np.ix_(g, g)].sum() for g in (order[i : i + size] for i in range(0, n, size)))

    best = max(score(list(order)) for order in permutations(range(n)))
    flat = [head for group in grouping._best(alike, size) for head in group]
    assert score(flat) == pytest.approx(best)
    swapped = [head for group in grouping._swapped(alike, size) for head in group]
    assert score(list(range(n))) - 1e-9 <= score(swapped) <= best + 1e-9


def test_the_order_of_heads_changes_nothing():
    """Queries and output move along: the sum over heads is the same."""
    rng = np.random.default_rng(0)
    before = attention(rng, 8, 4)
    after = reorder(before, [2, 0, 3, 1])

    def heads(a):
        return np.einsum("hdx,hdy,hmd,hdz->mz", a.q_HDX, np.repeat(a.k_KDX, 2, 0), a.o_HMD, np.repeat(a.v_KDX, 2, 0))

    assert np.allclose(heads(before), heads(after))
    assert not np.allclose(before.k_KDX, after.k_KDX)


@pytest.mark.parametrize("n_groups", [1, 4])
def test_groups_of_one_or_of_all_stay(n_groups):
    assert similar_order(moments_from_weights(attention(np.random.default_rng(0), 4, 4)), n_groups) == [0, 1, 2, 3]
