"""The inputs (`Moments`) and results (`Maps`) of the layer methods, for one group of heads.

A method does not read weights. Its input is the second moments of a group's heads, its result linear maps of the heads,
and `map_heads` multiplies the weights by these maps. So the same two numbers measure all methods:
`relative_logit_error` and `relative_output_error`.

H query heads and K key/value heads of the group, G groups, D head_dim, F = K·D the key or value heads side by side, P
RoPE pairs, X inputs, M outputs. Pair p of a head is its dimensions p and p + P (see `HeadMatrices`).
"""

from dataclasses import dataclass, replace

import numpy as np

from convert.layer_tensors.head_matrices import Complex, HeadMatrices, Real


@dataclass(frozen=True)
class Moments:
    """Second moments of one group, in float64."""

    queries_HDD: Real
    """Second moments of each query head, before rotation."""
    keys_FF: Real
    """Attention-weighted covariance of the key heads, rotated to the query's position."""
    values_FF: Real
    """Second moments of the value heads, mixed by attention."""
    outputs_HDD: Real
    """Oᵀ O of each query head: the metric that turns an error of its mixed values into an output error."""
    n_rotary_pairs: int
    raw_keys_FF: Real | None = None
    """Second moments of the key heads, not centred and before rotation. Layers with norms have them."""

    @property
    def head_dim(self) -> int:
        return int(self.queries_HDD.shape[1])

    @property
    def n_keys(self) -> int:
        return len(self.keys_FF) // self.head_dim

    def key_of(self, head: int) -> slice:
        """Return the rows of a query head's own key and value head."""
        key = head * self.n_keys // len(self.queries_HDD)
        return slice(key * self.head_dim, (key + 1) * self.head_dim)


@dataclass(frozen=True)
class Maps:
    """Linear maps from a group's heads to one shared key head and one shared value head."""

    keys_DF: Real
    """From all keys to the shared key. RoPE pairs are multiplied by complex numbers (`pair_scaling_map`)."""
    queries_HDD: Real
    """From each query head to the query of the shared key."""
    values_DF: Real
    """From all values to the shared value."""
    outputs_HDD: Real
    """From the shared value to the input of each query head's output projection."""


def moments_from_weights(group: HeadMatrices, raw_keys: bool = False) -> Moments:
    """Return the moments implied by the weights, for inputs whose second moments are the identity.

    Distances between queries and keys are uniform. So different pairs of a key are uncorrelated, because they rotate
    at different frequencies.

    `raw_keys`: whether to keep `raw_keys_FF`.
    """
    k_FX, v_FX = (heads.reshape(-1, heads.shape[2]) for heads in (group.k_KDX, group.v_KDX))
    queries_HDD = group.q_HDX @ group.q_HDX.transpose(0, 2, 1)
    outputs_HDD = group.o_HMD.transpose(0, 2, 1) @ group.o_HMD
    keys_FF = k_FX @ k_FX.T
    values_FF, raw_FF = v_FX @ v_FX.T, keys_FF if raw_keys else None
    moments = Moments(queries_HDD, keys_FF, values_FF, outputs_HDD, group.n_rotary_pairs, raw_FF)
    return drop_cross_pair_terms(moments)


def split_groups(whole: Moments, n_groups: int) -> list[Moments]:
    """Return the moments of each group of neighbours, as views of a whole layer's moments."""
    n_queries, n_rows = len(whole.queries_HDD) // n_groups, len(whole.keys_FF) // n_groups
    groups = []
    for g in range(n_groups):
        queries, rows = slice(g * n_queries, (g + 1) * n_queries), slice(g * n_rows, (g + 1) * n_rows)
        groups.append(
            replace(
                whole,
                queries_HDD=whole.queries_HDD[queries],
                keys_FF=whole.keys_FF[rows, rows],
                values_FF=whole.values_FF[rows, rows],
                outputs_HDD=whole.outputs_HDD[queries],
                raw_keys_FF=None if whole.raw_keys_FF is None else whole.raw_keys_FF[rows, rows],
            )
        )
    return groups


def drop_cross_pair_terms(moments: Moments) -> Moments:
    """Return the moments without the key moments between different pairs, as for uniform distances."""
    keys_FF = np.zeros_like(moments.keys_FF)
    pairs_PKK, old_FF = key_pair_moments(moments), moments.keys_FF
    n_rotary_pairs, size, n = moments.n_rotary_pairs, moments.head_dim, moments.n_keys
    starts_K = np.arange(n) * size
    for p in range(n_rotary_pairs):
        real, imaginary = starts_K + p, starts_K + p + n_rotary_pairs
        half_KK = pairs_PKK[p] / 2
        keys_FF[np.ix_(real, real)] = keys_FF[np.ix_(imaginary, imaginary)] = half_KK.real
        keys_FF[np.ix_(imaginary, real)], keys_FF[np.ix_(real, imaginary)] = half_KK.imag, -half_KK.imag
    unrotated = np.concatenate([start + np.arange(2 * n_rotary_pairs, size) for start in starts_K])
    keys_FF[np.ix_(unrotated, unrotated)] = old_FF[np.ix_(unrotated, unrotated)]
    return replace(moments, keys_FF=keys_FF)


def key_pair_moments(moments: Moments) -> Complex:
    """Return E[z_a conj(z_b)] for the keys a and b as complex numbers in each pair, [P, K, K]."""
    n, size, n_rotary_pairs = moments.n_keys, moments.head_dim, moments.n_rotary_pairs
    blocks_KDKD = moments.keys_FF.reshape(n, size, n, size)
    p = np.arange(n_rotary_pairs)
    real, imaginary = p, p + n_rotary_pairs
    re_PKK = blocks_KDKD[:, real, :, real] + blocks_KDKD[:, imaginary, :, imaginary]
    im_PKK = blocks_KDKD[:, imaginary, :, real] - blocks_KDKD[:, real, :, imaginary]
    return np.asarray(re_PKK + 1j * im_PKK)


def pair_scaling_map(factors_KP: Complex, head_dim: int) -> Real:
    """Return the map [D, F] that multiplies pair p of key k by a complex factor and sums the keys."""
    n, n_rotary_pairs = factors_KP.shape
    maps_KDD = np.zeros((n, head_dim, head_dim))
    real = np.arange(n_rotary_pairs)
    imaginary = real + n_rotary_pairs
    maps_KDD[:, real, real] = maps_KDD[:, imaginary, imaginary] = factors_KP.real
    maps_KDD[:, imaginary, real], maps_KDD[:, real, imaginary] = factors_KP.imag, -factors_KP.imag
    return np.concatenate(list(maps_KDD), axis=1)


def head_selector(moments: Moments, head: int) -> Real:
    """Return the map [D, F] that selects a query head's own key, or value, from the group's."""
    map_DF = np.zeros((moments.head_dim, len(moments.keys_FF)))
    map_DF[:, moments.key_of(head)] = np.eye(moments.head_dim)
    return map_DF


def keep_logit_variance(moments: Moments, maps: Maps) -> Maps:
    """Return the maps with queries scaled so that each query head's logits keep their variance.

    The model's loss depends more on the variance of the logits than on their squared error: attention that is too
    uniform costs more than attention that is slightly wrong. A least-squares merge shrinks keys, because it cancels the
    components in which a group's heads differ.
    """
    shared_DD = maps.keys_DF @ moments.keys_FF @ maps.keys_DF.T
    scales = []
    for head, (queries_DD, map_DD) in enumerate(zip(moments.queries_HDD, maps.queries_HDD, strict=True)):
        own_DD = moments.keys_FF[moments.key_of(head), moments.key_of(head)]
        before = float(np.einsum("de,de->", queries_DD, own_DD))
        after = float(np.einsum("de,de->", map_DD @ queries_DD @ map_DD.T, shared_DD))
        scales.append(np.sqrt(before / after) if before > 0 and after > 0 else 1.0)
    return replace(maps, queries_HDD=maps.queries_HDD * np.array(scales)[:, None, None])


def map_heads(attention: HeadMatrices, maps: list[Maps]) -> HeadMatrices:
    """Return a layer's attention with one shared K/V head for each of its G groups, without norms.

    `maps`: one entry a group. H and K are the heads of all groups.
    """
    k_GFX, v_GFX = (
        heads_KDX.reshape(len(maps), -1, heads_KDX.shape[2]) for heads_KDX in (attention.k_KDX, attention.v_KDX)
    )
    return replace(
        attention,
        norms=None,
        q_HDX=np.concatenate([group.queries_HDD for group in maps]) @ attention.q_HDX,
        k_KDX=np.stack([group.keys_DF for group in maps]) @ k_GFX,
        v_KDX=np.stack([group.values_DF for group in maps]) @ v_GFX,
        o_HMD=attention.o_HMD @ np.concatenate([group.outputs_HDD for group in maps]),
    )


def relative_logit_error(moments: Moments, maps: Maps) -> float:
    """Return the squared error of the logits with the shared key, as a share of the logits' variance."""
    backs_HDD = maps.queries_HDD.transpose(0, 2, 1)
    return _relative_error(moments, moments.queries_HDD, moments.keys_FF, backs_HDD, maps.keys_DF)


def relative_output_error(moments: Moments, maps: Maps) -> float:
    """Return the squared error of the output with the shared value, as a share of the output's energy, head by head."""
    return _relative_error(moments, moments.outputs_HDD, moments.values_FF, maps.outputs_HDD, maps.values_DF)


def energies(moments: Moments) -> tuple[float, float]:
    """Return the denominators of `relative_logit_error` and `relative_output_error`."""
    return (
        _energy(moments, moments.queries_HDD, moments.keys_FF),
        _energy(moments, moments.outputs_HDD, moments.values_FF),
    )


def _relative_error(moments: Moments, metric_HDD: Real, heads_FF: Real, backs_HDD: Real, shared_DF: Real) -> float:
    error, whole = 0.0, _energy(moments, metric_HDD, heads_FF)
    cross_DF = shared_DF @ heads_FF  # computed once, because it costs most
    for head, (metric_DD, back_DD) in enumerate(zip(metric_HDD, backs_HDD, strict=True)):
        error_DF = head_selector(moments, head) - back_DD @ shared_DF
        missing_DF = heads_FF[moments.key_of(head)] - back_DD @ cross_DF  # the error's moments with the heads
        error += float(np.einsum("de,ef,df->", metric_DD, missing_DF, error_DF, optimize=True))
    return error / whole if whole > 0 else 0.0


def _energy(moments: Moments, metric_HDD: Real, heads_FF: Real) -> float:
    owns = (heads_FF[moments.key_of(head), moments.key_of(head)] for head in range(len(metric_HDD)))
    return sum(float(np.einsum("de,de->", *pair)) for pair in zip(metric_HDD, owns, strict=True))
