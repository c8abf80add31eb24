"""What may be done to attention without changing it, and the merges that stand on it, in float64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.attention import LayerAttention, join, map_values, planes, scale_planes
from convert.methods import aligned, pca

N_HEADS, HEAD_DIM, HIDDEN = 8, 6, 64
MERGES = {"aligned": aligned.merge, "pca": pca.merge}


def make(seed: int, n_kv_heads: int = N_HEADS, bias: bool = False) -> LayerAttention:
    rng, x = np.random.default_rng(seed), HIDDEN + bias
    return LayerAttention(
        q_HDX=rng.normal(size=(N_HEADS, HEAD_DIM, x)),
        k_KDX=rng.normal(size=(n_kv_heads, HEAD_DIM, x)),
        v_KDX=rng.normal(size=(n_kv_heads, HEAD_DIM, x)),
        o_HMD=rng.normal(size=(N_HEADS, HIDDEN, HEAD_DIM)),
        n_planes=HEAD_DIM // 2,
    )


def output(attention: LayerAttention, seed: int = 0, n_tokens: int = 9) -> np.ndarray:
    """Return what the layer adds for some tokens, by the textbook: rotary embeddings, causal softmax, projections."""
    x_TX = np.random.default_rng(seed).normal(size=(n_tokens, attention.q_HDX.shape[2])) / 8
    if x_TX.shape[1] > HIDDEN:
        x_TX[:, -1] = 1
    angles_TP = np.arange(n_tokens)[:, None] / 100.0 ** (np.arange(attention.n_planes) / attention.n_planes)
    turned = [
        planes(heads, attention.n_planes).transpose(0, 2, 1)[None] for heads in (attention.q_HDX, attention.k_KDX)
    ]
    q_HTP, k_KTP = (np.einsum("tx,hxp->htp", x_TX, rows[0]) * np.exp(1j * angles_TP) for rows in turned)
    times = attention.heads_per_group
    scores = np.einsum("htp,hsp->hts", q_HTP, np.repeat(k_KTP, times, axis=0).conj()).real / HEAD_DIM**0.5
    scores[:, np.triu_indices(n_tokens, 1)[0], np.triu_indices(n_tokens, 1)[1]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    v_HTD = np.repeat(np.einsum("tx,kdx->ktd", x_TX, attention.v_KDX), times, axis=0)
    return np.einsum("hts,hsd,hmd->tm", weights, v_HTD, attention.o_HMD)


def difference(one: LayerAttention, other: LayerAttention) -> float:
    return float(np.abs(output(one) - output(other)).max() / output(one).std())


def random_turns(rng, n: int) -> np.ndarray:
    return np.exp(1j * rng.uniform(0, 2 * np.pi, (n, HEAD_DIM // 2)))


def random_rotations(rng, n: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(n, HEAD_DIM, HEAD_DIM)))[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_kv_heads", [8, 4, 1])
def test_allowed_maps_change_nothing(n_kv_heads, bias):
    rng, attention = np.random.default_rng(1), make(0, n_kv_heads, bias)
    scaled = random_turns(rng, n_kv_heads) * rng.uniform(0.3, 3, (n_kv_heads, HEAD_DIM // 2))
    assert difference(attention, scale_planes(attention, scaled)) < 1e-9
    assert difference(attention, map_values(attention, rng.normal(size=(n_kv_heads, HEAD_DIM, HEAD_DIM)))) < 1e-9


def test_a_general_rotation_of_keys_does():
    """It does not commute with rotary embeddings, though queries are rotated alike."""
    rng, attention = np.random.default_rng(1), make(0)
    maps = random_rotations(rng, N_HEADS)
    turned = replace(attention, q_HDX=maps @ attention.q_HDX, k_KDX=maps @ attention.k_KDX)
    assert difference(attention, turned) > 0.01


@pytest.mark.parametrize("method", MERGES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), groups=st.sampled_from([1, 2, 4]), bias=st.booleans())
def test_heads_equal_up_to_allowed_maps_merge_without_loss(method, seed, groups, bias):
    rng, few = np.random.default_rng(seed), make(seed, groups, bias)
    times = N_HEADS // groups
    many = replace(few, k_KDX=np.repeat(few.k_KDX, times, axis=0), v_KDX=np.repeat(few.v_KDX, times, axis=0))
    many = map_values(scale_planes(many, random_turns(rng, N_HEADS)), random_rotations(rng, N_HEADS))
    assert difference(few, many) < 1e-9
    merged = MERGES[method](many, groups, None)
    assert merged.k_KDX.shape == few.k_KDX.shape
    assert difference(few, merged) < 1e-8


@pytest.mark.parametrize("method", MERGES)
def test_with_moments_of_the_input_too(method):
    rng, few = np.random.default_rng(3), make(3, 2)
    many = replace(few, k_KDX=np.repeat(few.k_KDX, 4, axis=0), v_KDX=np.repeat(few.v_KDX, 4, axis=0))
    many = map_values(scale_planes(many, random_turns(rng, N_HEADS)), random_rotations(rng, N_HEADS))
    root = np.linalg.cholesky(np.cov(rng.normal(size=(HIDDEN, 500))) + np.eye(HIDDEN))
    assert difference(few, MERGES[method](many, 2, root)) < 1e-8


def value_error(parent: LayerAttention, child: LayerAttention) -> float:
    """Return Σ over query heads of ‖O_h V_h - O'_h V'‖²: what `pca` minimises."""
    maps = [a.o_HMD @ np.repeat(a.v_KDX, a.heads_per_group, axis=0) for a in (parent, child)]
    return float(((maps[0] - maps[1]) ** 2).sum())


def key_error(parent: LayerAttention, child: LayerAttention) -> float:
    """Return Σ over query heads and planes of ‖q‖² · ‖k - what the child's key is to this query‖²."""
    q = [planes(a.q_HDX, a.n_planes) for a in (parent, child)]
    k = [np.repeat(planes(a.k_KDX, a.n_planes), a.heads_per_group, axis=0) for a in (parent, child)]
    power = (np.abs(q[0]) ** 2).sum(-1)
    # A child's query is the parent's times a complex number; to the parent's, its key is the conjugate times that key.
    factor = (q[1] * q[0].conj()).sum(-1) / power
    return float((power[..., None] * np.abs(k[0] - factor.conj()[..., None] * k[1]) ** 2).sum())


def mean(attention: LayerAttention, groups: int) -> LayerAttention:
    """Return the paper's merge, on the heads as they stand."""
    return join(
        [
            replace(g, k_KDX=g.k_KDX.mean(0, keepdims=True), v_KDX=g.v_KDX.mean(0, keepdims=True))
            for g in attention.groups(groups)
        ]
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), groups=st.sampled_from([1, 2, 4]), shared=st.floats(0, 1))
def test_pca_is_at_least_as_close_as_aligned_and_that_as_mean(seed, groups, shared):
    """On heads with a shared part, seen in coordinates of their own."""
    rng, attention = np.random.default_rng(seed), make(seed)
    attention = replace(
        attention,
        k_KDX=shared * attention.k_KDX[:1] + (1 - shared) * attention.k_KDX,
        v_KDX=shared * attention.v_KDX[:1] + (1 - shared) * attention.v_KDX,
    )
    attention = map_values(scale_planes(attention, random_turns(rng, N_HEADS)), random_rotations(rng, N_HEADS))
    children = [mean(attention, groups), aligned.merge(attention, groups, None), pca.merge(attention, groups, None)]
    for error in (key_error, value_error):
        errors = [error(attention, child) for child in children]
        slack = 1e-9 * error(attention, replace(children[0], k_KDX=0 * children[0].k_KDX, v_KDX=0 * children[0].v_KDX))
        assert errors[2] <= errors[1] + slack
        assert errors[2] <= errors[0] + slack
