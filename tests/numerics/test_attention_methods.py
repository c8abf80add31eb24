"""What may be done to attention without changing it, and the merges that stand on it, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.layer_tensors.head_matrices import HeadMatrices
from convert.merging.layer_merge import LayerMerge, merge_attention, read_attention
from convert.merging.merge_recipe import MergeRecipe
from convert.merging.methods import LAYER_METHODS, aligned, fit, pca
from convert.merging.moments import (
    Maps,
    Moments,
    drop_cross_pair_terms,
    keep_logit_variance,
    map_heads,
    moments_from_weights,
    relative_logit_error,
    relative_output_error,
)
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint

N_HEADS, HEAD_DIM, HIDDEN = 8, 6, 64


def pairs(rows_NDX: np.ndarray, n_rotary_pairs: int) -> np.ndarray:
    """Return the rotated dimensions of heads as complex rows, [N, P, X].

    Rotary embeddings multiply pair i of every head at position m by the same exp(j·m·θ_i), so that a query and a key
    give Re(q · conj(k)), summed over pairs, with the difference of their positions (Su et al. 2021, section 3.4).
    """
    return rows_NDX[:, :n_rotary_pairs] + 1j * rows_NDX[:, n_rotary_pairs : 2 * n_rotary_pairs]


def with_pairs(rows_NDX: np.ndarray, pairs_NPX: np.ndarray) -> np.ndarray:
    """Return heads with other rotated dimensions."""
    n_rotary_pairs = pairs_NPX.shape[1]
    rows_NDX = rows_NDX.copy()
    rows_NDX[:, :n_rotary_pairs], rows_NDX[:, n_rotary_pairs : 2 * n_rotary_pairs] = pairs_NPX.real, pairs_NPX.imag
    return rows_NDX


def scale_pairs(attention: HeadMatrices, factors_KP: np.ndarray) -> HeadMatrices:
    """Multiply each pair of each key by a complex number, and those of its queries so that their products stay.

    Nothing else on the rotated dimensions commutes with rotary embeddings.
    """
    k_KPX = pairs(attention.k_KDX, attention.n_rotary_pairs) * factors_KP[..., None]
    of_queries_HP = np.repeat(1 / factors_KP.conj(), attention.heads_per_group, axis=0)
    q_HPX = pairs(attention.q_HDX, attention.n_rotary_pairs) * of_queries_HP[..., None]
    return replace(attention, q_HDX=with_pairs(attention.q_HDX, q_HPX), k_KDX=with_pairs(attention.k_KDX, k_KPX))


def map_values(attention: HeadMatrices, maps_KDD: np.ndarray) -> HeadMatrices:
    """Apply an invertible map to each value head, and its inverse where the output projection reads it."""
    inverse_HDD = np.repeat(np.linalg.inv(maps_KDD), attention.heads_per_group, axis=0)
    return replace(attention, v_KDX=maps_KDD @ attention.v_KDX, o_HMD=attention.o_HMD @ inverse_HDD)


def make(seed: int, n_kv_heads: int = N_HEADS, bias: bool = False) -> HeadMatrices:
    rng, x = np.random.default_rng(seed), HIDDEN + bias
    return HeadMatrices(
        q_HDX=rng.normal(size=(N_HEADS, HEAD_DIM, x)),
        k_KDX=rng.normal(size=(n_kv_heads, HEAD_DIM, x)),
        v_KDX=rng.normal(size=(n_kv_heads, HEAD_DIM, x)),
        o_HMD=rng.normal(size=(N_HEADS, HIDDEN, HEAD_DIM)),
        n_rotary_pairs=HEAD_DIM // 2,
    )


def output(attention: HeadMatrices, seed: int = 0, n_tokens: int = 9) -> np.ndarray:
    """Return what the layer adds for some tokens, by the textbook: rotary embeddings, causal softmax, projections."""
    x_TX = np.random.default_rng(seed).normal(size=(n_tokens, attention.q_HDX.shape[2])) / 8
    if x_TX.shape[1] > HIDDEN:
        x_TX[:, -1] = 1
    angles_TP = np.arange(n_tokens)[:, None] / 100.0 ** (np.arange(attention.n_rotary_pairs) / attention.n_rotary_pairs)
    rotated = [
        pairs(heads, attention.n_rotary_pairs).transpose(0, 2, 1)[None] for heads in (attention.q_HDX, attention.k_KDX)
    ]
    q_HTP, k_KTP = (np.einsum("tx,hxp->htp", x_TX, rows[0]) * np.exp(1j * angles_TP) for rows in rotated)
    heads_per_group = attention.heads_per_group
    scores = np.einsum("htp,hsp->hts", q_HTP, np.repeat(k_KTP, heads_per_group, axis=0).conj()).real / HEAD_DIM**0.5
    scores[:, np.triu_indices(n_tokens, 1)[0], np.triu_indices(n_tokens, 1)[1]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    v_HTD = np.repeat(np.einsum("tx,kdx->ktd", x_TX, attention.v_KDX), heads_per_group, axis=0)
    return np.einsum("hts,hsd,hmd->tm", weights, v_HTD, attention.o_HMD)


def difference(one: HeadMatrices, other: HeadMatrices) -> float:
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
    assert difference(attention, scale_pairs(attention, scaled)) < 1e-9
    assert difference(attention, map_values(attention, rng.normal(size=(n_kv_heads, HEAD_DIM, HEAD_DIM)))) < 1e-9


def test_a_general_rotation_of_keys_changes_the_output():
    """It does not commute with rotary embeddings, though queries are rotated alike."""
    rng, attention = np.random.default_rng(1), make(0)
    maps = random_rotations(rng, N_HEADS)
    rotated = replace(attention, q_HDX=maps @ attention.q_HDX, k_KDX=maps @ attention.k_KDX)
    assert difference(attention, rotated) > 0.01


def equivalent_mha(few: HeadMatrices, rng) -> HeadMatrices:
    """Return the same attention with one K/V head per query head, each mapped differently."""
    n = few.heads_per_group
    many = replace(few, k_KDX=np.repeat(few.k_KDX, n, axis=0), v_KDX=np.repeat(few.v_KDX, n, axis=0))
    return map_values(scale_pairs(many, random_turns(rng, N_HEADS)), random_rotations(rng, N_HEADS))


def from_inputs(group: HeadMatrices, rng, n_inputs: int = 400) -> Moments:
    """Return a group's moments where inputs are as they come: their directions differ in strength and hang together."""
    x_NX = rng.normal(size=(n_inputs, HIDDEN)) * rng.uniform(0.1, 2, HIDDEN) @ rng.normal(size=(HIDDEN, HIDDEN))
    if group.q_HDX.shape[2] > HIDDEN:
        x_NX = np.column_stack([x_NX, np.ones(n_inputs)])
    root_XX = np.linalg.cholesky(x_NX.T @ x_NX / n_inputs + 1e-6 * np.eye(x_NX.shape[1]))
    seen = (group.q_HDX @ root_XX, group.k_KDX @ root_XX, group.v_KDX @ root_XX)
    k_FX, v_FX = (heads.reshape(-1, heads.shape[2]) for heads in seen[1:])
    return replace(
        moments_from_weights(group),
        queries_HDD=seen[0] @ seen[0].transpose(0, 2, 1),
        keys_FF=k_FX @ k_FX.T,
        values_FF=v_FX @ v_FX.T,
    )


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("method", LAYER_METHODS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), groups=st.sampled_from([1, 2, 4]), bias=st.booleans())
def test_heads_equal_up_to_allowed_maps_merge_without_loss(method, calibrated, seed, groups, bias):
    rng, few = np.random.default_rng(seed), make(seed, groups, bias)
    many = equivalent_mha(few, rng)
    assert difference(few, many) < 1e-9
    known = [from_inputs(group, rng) if calibrated else moments_from_weights(group) for group in many.groups(groups)]
    merged = merge_attention(many, known, method)
    assert merged.k_KDX.shape == few.k_KDX.shape
    assert difference(few, merged) < (1e-6 if calibrated else 1e-8)


def mean(moments: Moments) -> Maps:
    """Return the paper's merge, of the heads as they stand."""
    eye = np.eye(moments.head_dim)
    shared, same = np.tile(eye, moments.n_keys) / moments.n_keys, np.stack([eye] * len(moments.queries_HDD))
    return Maps(shared, same, shared, same)


def plain(moments: Moments) -> Moments:
    """Return the moments with all queries and outputs alike, and positions at random: what `aligned` looks at."""
    eyes = np.stack([np.eye(moments.head_dim)] * len(moments.queries_HDD))
    return replace(drop_cross_pair_terms(moments), queries_HDD=eyes, outputs_HDD=eyes)


def check_order(moments: Moments) -> None:
    """Each method is at least as good as the one before it at what it minimises."""
    alike, apart = plain(moments), drop_cross_pair_terms(moments)
    for lost in (relative_logit_error, relative_output_error):
        assert lost(alike, aligned.merge(alike)) <= lost(alike, mean(alike)) + 1e-9
        assert lost(alike, pca.merge(alike)) <= lost(alike, aligned.merge(alike)) + 1e-6
        assert lost(apart, pca.merge(apart)) <= min(lost(apart, m(apart)) for m in (mean, aligned.merge)) + 1e-6
        assert lost(moments, fit.merge(moments)) <= lost(moments, pca.merge(moments)) + 1e-6


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), groups=st.sampled_from([1, 2, 4]), shared=st.floats(0, 1))
def test_each_method_loses_no_more_than_the_one_before(seed, groups, shared):
    """On heads with a shared part, seen in coordinates of their own."""
    rng, attention = np.random.default_rng(seed), make(seed)
    attention = replace(
        attention,
        k_KDX=shared * attention.k_KDX[:1] + (1 - shared) * attention.k_KDX,
        v_KDX=shared * attention.v_KDX[:1] + (1 - shared) * attention.v_KDX,
    )
    attention = map_values(scale_pairs(attention, random_turns(rng, N_HEADS)), random_rotations(rng, N_HEADS))
    for group in attention.groups(groups):
        check_order(moments_from_weights(group))
        check_order(from_inputs(group, rng))


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_each_method_loses_no_more_on_trained_weights(groups):
    with open_checkpoint(tiny.DEMO) as checkpoint:
        for layer in make_merge_plan(checkpoint, groups, MergeRecipe("pca"), None).conversions[::3]:
            assert isinstance(layer, LayerMerge)
            for group in read_attention(checkpoint, layer).groups(groups):
                check_order(moments_from_weights(group))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), method=st.sampled_from([aligned, pca, fit]))
def test_logits_keep_their_spread(seed, method):
    known = from_inputs(make(seed), np.random.default_rng(seed))
    wider = keep_logit_variance(known, method.merge(known))
    for head, queries_DD in enumerate(known.queries_HDD):
        own = known.keys_FF[known.key_of(head), known.key_of(head)]
        back = wider.queries_HDD[head].T @ wider.keys_DF
        spread = np.trace(queries_DD @ back @ known.keys_FF @ back.T)
        assert spread == pytest.approx(np.trace(queries_DD @ own))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_kv_heads", [N_HEADS, 4])
def test_maps_of_all_groups_are_applied_as_those_of_each(n_kv_heads, bias):
    """To the bit."""
    rng, groups = np.random.default_rng(4), 2
    attention = make(0, n_kv_heads, bias)
    n_queries, n_keys = N_HEADS // groups, n_kv_heads // groups
    shapes = [(HEAD_DIM, n_keys * HEAD_DIM), (n_queries, HEAD_DIM, HEAD_DIM)] * 2
    maps = [Maps(*(rng.normal(size=shape) for shape in shapes)) for _ in range(groups)]
    merged = map_heads(attention, maps)
    assert len(merged.k_KDX) == len(merged.v_KDX) == groups
    for g, group in enumerate(attention.groups(groups)):
        queries = slice(g * n_queries, (g + 1) * n_queries)
        k_FX, v_FX = (np.concatenate(list(heads)) for heads in (group.k_KDX, group.v_KDX))
        assert np.array_equal(merged.k_KDX[g], maps[g].keys_DF @ k_FX)
        assert np.array_equal(merged.v_KDX[g], maps[g].values_DF @ v_FX)
        assert np.array_equal(merged.q_HDX[queries], maps[g].queries_HDD @ group.q_HDX)
        assert np.array_equal(merged.o_HMD[queries], group.o_HMD @ maps[g].outputs_HDD)
