"""The merge methods as pure functions."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convert.merging.methods import HEAD_METHODS, find_head_method

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@st.composite
def heads(draw):
    """Draw heads of any dtype and size, and a number of groups that divides them."""
    n_groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    shape = (n_groups * per_group, draw(st.integers(1, 5)), draw(st.integers(1, 40)))
    seed, dtype = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(list(DTYPES)))
    return np.random.default_rng(seed).normal(size=shape).astype(DTYPES[dtype]), n_groups, dtype


def rng():
    return np.random.default_rng(0)


def merged_groups(method, w, n_groups):
    """Merge each group of neighbours with one generator, as a conversion does."""
    generator = rng()
    return np.stack([find_head_method(method)(group, generator) for group in w.reshape(n_groups, -1, *w.shape[1:])])


@given(heads())
def test_mean_is_the_float64_mean_rounded(case):
    w, n_groups, dtype = case
    merged = merged_groups("mean", w, n_groups)
    exact = torch.from_numpy(w.astype(np.float64)).view(n_groups, -1, *w.shape[1:]).mean(dim=1)
    assert merged.dtype == w.dtype
    if dtype in ("F16", "BF16"):
        assert np.array_equal(merged.astype(np.float32), exact.to(TORCH[dtype]).float().numpy())
    else:  # the order of summing float64 may differ in its last bit
        np.testing.assert_allclose(merged, exact.numpy(), rtol=1e-7 if dtype == "F32" else 1e-14, atol=1e-15)


@given(heads())
def test_merging_equal_heads_gives_that_head(case):
    w, n_groups, dtype = case
    # Three times a float64 need not be one; for every smaller dtype the sum is exact.
    same = np.repeat(w[:n_groups], 4 if dtype == "F64" else 3, axis=0)
    for method in ("mean", "first"):
        assert merged_groups(method, same, n_groups).tobytes() == w[:n_groups].tobytes()


@given(heads())
def test_first_takes_the_first_of_each_group(case):
    w, n_groups, _ = case
    merged = merged_groups("first", w, n_groups)
    per_group = len(w) // n_groups
    for group in range(n_groups):
        assert merged[group].tobytes() == w[group * per_group].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_has_the_group_s_scale_and_nothing_else_of_it(dtype):
    w = np.random.default_rng(1).normal(size=(8, 64, 200), scale=0.02)
    w[4:] *= 10
    w = w.astype(DTYPES[dtype])
    merged = merged_groups("random", w, 2).astype(np.float64)
    assert merged.std(axis=(1, 2)) == pytest.approx([0.02, 0.2], rel=0.03)
    correlation = np.corrcoef(merged[0].ravel(), w[0].astype(np.float64).ravel())[0, 1]
    assert abs(correlation) < 0.05


@pytest.mark.parametrize("method", HEAD_METHODS)
@given(case=heads())
def test_a_group_becomes_one_head_of_its_shape_and_dtype(method, case):
    w, _, _ = case
    merged = find_head_method(method)(w, rng())
    assert (merged.shape, merged.dtype) == (w.shape[1:], w.dtype)


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_methods_are_pure(method):
    w = np.random.default_rng(0).normal(size=(4, 3, 5))
    copy = w.copy()
    first = find_head_method(method)(w, rng())
    first[:] = 7
    assert np.array_equal(w, copy)
    assert not np.array_equal(find_head_method(method)(w, rng()), first)


def test_mean_of_long_heads_is_summed_in_blocks():
    w = np.random.default_rng(0).normal(size=(3, 200, 1500)).astype(np.float32)
    expected = w.astype(np.float64).mean(axis=0).astype(np.float32)
    assert np.array_equal(find_head_method("mean")(w, rng()), expected)
