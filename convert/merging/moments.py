"""What the merge methods know of a group of heads, and what they make of it.

A method never sees weights. It gets second moments of what a group's heads give (`Moments`) and returns linear maps of
the heads (`Maps`), which `apply` puts into the weights. So all methods are judged by the same two numbers,
`lost_logits` and `lost_output`.

H query heads and K key/value heads of the group, D head_dim, F = K·D the key or value heads side by side, P rotary
planes, X inputs. Plane p of a head are its dimensions p and p + P (see `convert.merging.weights`).
"""

from dataclasses import dataclass, replace

import numpy as np

from convert.merging.weights import Complex, LayerAttention, Real


@dataclass(frozen=True)
class Moments:
    """Second moments of one group, in float64."""

    queries_HDD: Real
    """Of each query head, before rotation."""
    keys_FF: Real
    """Of the key heads, as the queries meet them: turned to the query's position, from their mean, by attention."""
    values_FF: Real
    """Of the value heads, as attention mixes them."""
    outputs_HDD: Real
    """Oᵀ O of each query head: how far the output moves when what the head reads moves."""
    n_rotary_pairs: int

    @property
    def head_dim(self) -> int:
        return int(self.queries_HDD.shape[1])

    @property
    def n_keys(self) -> int:
        return len(self.keys_FF) // self.head_dim

    def key_of(self, head: int) -> slice:
        """Return the rows of the key head, and of the value head, that a query head reads."""
        key = head * self.n_keys // len(self.queries_HDD)
        return slice(key * self.head_dim, (key + 1) * self.head_dim)


@dataclass(frozen=True)
class Maps:
    """How a group's heads become heads that share one key and one value head."""

    keys_DF: Real
    """The shared key, of all keys. On rotated dimensions it multiplies planes by complex numbers (`scaled_planes`)."""
    queries_HDD: Real
    values_DF: Real
    outputs_HDD: Real
    """What stands before each query head's output projection."""


def moments_from_weights(group: LayerAttention, root_XX: Real | None = None) -> Moments:
    """Return the moments of a group of which nothing is known but its inputs' second moments, root · rootᵀ.

    Without these all directions of the inputs count alike. All distances between queries and keys do; then different
    planes of a key are independent, since they turn at different speeds.
    """
    q_HDX, k_KDX, v_KDX = (x if root_XX is None else x @ root_XX for x in (group.q_HDX, group.k_KDX, group.v_KDX))
    k_FX, v_FX = (heads.reshape(-1, heads.shape[2]) for heads in (k_KDX, v_KDX))
    queries_HDD = q_HDX @ q_HDX.transpose(0, 2, 1)
    outputs_HDD = group.o_HMD.transpose(0, 2, 1) @ group.o_HMD
    found = Moments(queries_HDD, k_FX @ k_FX.T, v_FX @ v_FX.T, outputs_HDD, group.n_rotary_pairs)
    return drop_cross_pair_terms(found)


def split(whole: Moments, n_groups: int) -> list[Moments]:
    """Return the moments of each group of neighbours, of a whole layer's; they are views."""
    n_queries, n_rows = len(whole.queries_HDD) // n_groups, len(whole.keys_FF) // n_groups
    found = []
    for g in range(n_groups):
        queries, rows = slice(g * n_queries, (g + 1) * n_queries), slice(g * n_rows, (g + 1) * n_rows)
        found.append(
            replace(
                whole,
                queries_HDD=whole.queries_HDD[queries],
                keys_FF=whole.keys_FF[rows, rows],
                values_FF=whole.values_FF[rows, rows],
                outputs_HDD=whole.outputs_HDD[queries],
            )
        )
    return found


def drop_cross_pair_terms(moments: Moments) -> Moments:
    """Return the moments with those between different planes of keys set to 0, as if all distances were as frequent."""
    kept_FF = np.zeros_like(moments.keys_FF)
    planes_PKK, rest_FF = key_planes(moments), moments.keys_FF
    n_rotary_pairs, size, n = moments.n_rotary_pairs, moments.head_dim, moments.n_keys
    starts_K = np.arange(n) * size
    for p in range(n_rotary_pairs):
        real, imaginary = starts_K + p, starts_K + p + n_rotary_pairs
        half_KK = planes_PKK[p] / 2
        kept_FF[np.ix_(real, real)] = kept_FF[np.ix_(imaginary, imaginary)] = half_KK.real
        kept_FF[np.ix_(imaginary, real)], kept_FF[np.ix_(real, imaginary)] = half_KK.imag, -half_KK.imag
    still = np.concatenate([start + np.arange(2 * n_rotary_pairs, size) for start in starts_K])
    kept_FF[np.ix_(still, still)] = rest_FF[np.ix_(still, still)]
    return replace(moments, keys_FF=kept_FF)


def key_planes(moments: Moments) -> Complex:
    """Return E[z_a conj(z_b)] of the keys a and b, as complex numbers in each plane, [P, K, K]."""
    n, size, n_rotary_pairs = moments.n_keys, moments.head_dim, moments.n_rotary_pairs
    blocks_KDKD = moments.keys_FF.reshape(n, size, n, size)
    p = np.arange(n_rotary_pairs)
    real, imaginary = p, p + n_rotary_pairs
    re_PKK = blocks_KDKD[:, real, :, real] + blocks_KDKD[:, imaginary, :, imaginary]
    im_PKK = blocks_KDKD[:, imaginary, :, real] - blocks_KDKD[:, real, :, imaginary]
    return np.asarray(re_PKK + 1j * im_PKK)


def scaled_planes(factors_KP: Complex, head_dim: int) -> Real:
    """Return the map [D, F] that multiplies plane p of key k by a complex number and adds the keys up."""
    n, n_rotary_pairs = factors_KP.shape
    maps_KDD = np.zeros((n, head_dim, head_dim))
    real = np.arange(n_rotary_pairs)
    imaginary = real + n_rotary_pairs
    maps_KDD[:, real, real] = maps_KDD[:, imaginary, imaginary] = factors_KP.real
    maps_KDD[:, imaginary, real], maps_KDD[:, real, imaginary] = factors_KP.imag, -factors_KP.imag
    return np.concatenate(list(maps_KDD), axis=1)


def head_selector(moments: Moments, head: int) -> Real:
    """Return the map [D, F] that gives a query head's own key, or value, of all in the group."""
    map_DF = np.zeros((moments.head_dim, len(moments.keys_FF)))
    map_DF[:, moments.key_of(head)] = np.eye(moments.head_dim)
    return map_DF


def apply(group: LayerAttention, maps: Maps) -> LayerAttention:
    """Return the group with its one K/V head."""
    k_FX, v_FX = (heads.reshape(-1, heads.shape[2]) for heads in (group.k_KDX, group.v_KDX))
    return replace(
        group,
        q_HDX=maps.queries_HDD @ group.q_HDX,
        k_KDX=(maps.keys_DF @ k_FX)[None],
        v_KDX=(maps.values_DF @ v_FX)[None],
        o_HMD=group.o_HMD @ maps.outputs_HDD,
    )


def relative_logit_error(moments: Moments, maps: Maps) -> float:
    """Return the share of the attention logits' variance that the shared key does not give back."""
    backs_HDD = maps.queries_HDD.transpose(0, 2, 1)
    return _lost(moments, moments.queries_HDD, moments.keys_FF, backs_HDD, maps.keys_DF)


def relative_output_error(moments: Moments, maps: Maps) -> float:
    """Return the share of the output's energy that the shared value head does not give back, head by head."""
    return _lost(moments, moments.outputs_HDD, moments.values_FF, maps.outputs_HDD, maps.values_DF)


def energies(moments: Moments) -> tuple[float, float]:
    """Return what `relative_logit_error` and `relative_output_error` are shares of."""
    return (
        _energy(moments, moments.queries_HDD, moments.keys_FF),
        _energy(moments, moments.outputs_HDD, moments.values_FF),
    )


def _lost(moments: Moments, metric_HDD: Real, heads_FF: Real, backs_HDD: Real, shared_DF: Real) -> float:
    lost, whole = 0.0, _energy(moments, metric_HDD, heads_FF)
    given_DF = shared_DF @ heads_FF  # once, since it is the most work by far
    for head, (metric_DD, back_DD) in enumerate(zip(metric_HDD, backs_HDD, strict=True)):
        error_DF = head_selector(moments, head) - back_DD @ shared_DF
        missing_DF = heads_FF[moments.key_of(head)] - back_DD @ given_DF  # the error, of the heads
        lost += float(np.einsum("de,ef,df->", metric_DD, missing_DF, error_DF, optimize=True))
    return lost / whole if whole > 0 else 0.0


def _energy(moments: Moments, metric_HDD: Real, heads_FF: Real) -> float:
    owns = (heads_FF[moments.key_of(head), moments.key_of(head)] for head in range(len(metric_HDD)))
    return sum(float(np.einsum("de,de->", *pair)) for pair in zip(metric_HDD, owns, strict=True))
