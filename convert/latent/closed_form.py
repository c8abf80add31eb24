"""Solve for the latent attention of a layer in closed form, from second moments of its inputs.

Keys are rotated by RoPE pair, so a RoPE pair of all K/V heads is a vector of complex numbers, and every complex linear
map of it commutes with the rotation. The shared rotated key holds the principal components of these vectors, weighted
by the queries that read them. What it leaves out of slow pairs, and all values, go into the latent: the principal
components of the inputs, weighted by what queries and output projections make of them.

Letters: H query heads, K key/value heads, G query heads of one of these, D head_dim, U = 2·D (a key and a value), P
pairs (D/2), F complex numbers of a fold (its pairs, of all K/V heads), C channels of the rotated key, L latent, N
unrotated dimensions, R rotated ones, X inputs, M outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.latent.frequencies import Fold, SourceRope, coherence, folds, frequencies_at
from convert.latent.matrices import LatentMatrices
from convert.latent.sizes import LatentSizes
from convert.layer_tensors.head_matrices import Complex, HeadMatrices, Real

Matrix = NDArray[Any]
"""Real or complex."""

_NEGLIGIBLE = 1e-12
"""Eigenvalues below this share of the largest count as zero."""
_ROUND_OFF = 1e-9
"""Results below this share of the numbers they are computed from count as zero. Balancing would scale them up."""


@dataclass(frozen=True)
class InputMoments:
    """Second moments of a layer's attention inputs."""

    tokens_XX: Real
    """Of all tokens: queries are projections of these."""
    attended_XX: Real
    """Of the tokens that a query attends to, relative to their mean, weighted by attention: a change of logits that is
    equal for all keys changes nothing."""
    mixed_XX: Real
    """Of the inputs as attention has averaged them: values are projections of these."""

    @cached_property
    def roots(self) -> tuple[Real, Real]:
        """The square root of `mixed_XX`, and that root's pseudo-inverse."""
        return _roots(self.mixed_XX)


def moments_from_norm(norm_X: Real) -> InputMoments:
    """Return the moments of inputs that are independent numbers of unit power before the norm's weights."""
    diagonal_XX = np.diag(norm_X**2)
    return InputMoments(diagonal_XX, diagonal_XX, diagonal_XX)


@dataclass(frozen=True)
class LatentTarget:
    """What a layer's attention is converted to."""

    sizes: LatentSizes
    source_rope: SourceRope
    pair_indices: tuple[float, ...]
    """The pair indices of the rotated key's channels (`convert.latent.frequencies`)."""

    @property
    def frequencies_C(self) -> Real:
        """The frequencies of the channels."""
        return frequencies_at(self.source_rope, self.pair_indices)


@dataclass(frozen=True)
class _Heads:
    """Queries and keys with a pair as a complex number, and their products with the moments of what they are made of.

    A product with a moment of all inputs is the largest part of the work, so it is computed once, of real numbers.
    """

    q_HPX: Complex
    k_KPX: Complex
    q_moment_HPX: Complex
    """Queries times `tokens_XX`."""
    k_moment_KPX: Complex
    """Keys times `attended_XX`."""

    @classmethod
    def of(cls, before: HeadMatrices, moments: InputMoments) -> "_Heads":
        products = (before.q_HDX @ moments.tokens_XX, before.k_KDX @ moments.attended_XX)
        half = before.q_HDX.shape[1] // 2
        return cls(*(heads[:, :half] + 1j * heads[:, half:] for heads in (before.q_HDX, before.k_KDX, *products)))


def solve(before: HeadMatrices, moments: InputMoments, target: LatentTarget) -> LatentMatrices:
    """Return the latent attention of a layer."""
    return next(solve_each(before, moments, target, (1.0,)))


def solve_each(
    before: HeadMatrices, moments: InputMoments, target: LatentTarget, key_weights: Sequence[float]
) -> Iterator[LatentMatrices]:
    """Yield the latent attention of a layer for each weight of keys against values in the latent."""
    heads, sizes, source_rope = _Heads.of(before, moments), target.sizes, target.source_rope
    rest_KPX = heads.k_KPX.copy()
    query_HCX = np.zeros((sizes.n_heads, sizes.qk_rope_head_dim // 2, sizes.hidden_size), dtype=np.complex128)
    key_CX = np.zeros((sizes.qk_rope_head_dim // 2, sizes.hidden_size), dtype=np.complex128)
    for fold in folds(target.pair_indices, sizes.head_dim // 2):
        _fill_channels(fold, heads, query_HCX, key_CX, rest_KPX)
    rest_KPX *= coherence(source_rope.frequencies, source_rope.context)[:, None]
    rest_KDX = np.concatenate([rest_KPX.real, rest_KPX.imag], axis=1)
    for key_weight in key_weights:
        latent = _latent(before, rest_KDX, moments, sizes.latent_dim, key_weight)
        yield join_parts(before, query_HCX, key_CX, latent, target)


def join_parts(
    before: HeadMatrices, query_HCX: Complex, key_CX: Complex, latent: tuple[Real, Real, Real], target: LatentTarget
) -> LatentMatrices:
    """Return the latent attention of rotated queries and key, and of the latent with its maps to keys and values.

    `latent`: the latent [L, X], and its maps to the source's keys and values, [K, D, L] each.
    """
    latent_LX, k_KDL, v_KDL = latent
    heads_per_group = before.heads_per_group
    padding = ((0, 0), (0, target.sizes.qk_nope_head_dim - target.sizes.head_dim), (0, 0))
    scale = target.source_rope.attention_scaling**2  # of logits; queries take it
    return LatentMatrices(
        q_HNX=np.pad(before.q_HDX * scale, padding),
        q_HRX=np.concatenate([query_HCX.real, query_HCX.imag], axis=1) * scale,
        latent_LX=latent_LX,
        key_RX=np.concatenate([key_CX.real, key_CX.imag]),
        k_HNL=np.pad(np.repeat(k_KDL, heads_per_group, axis=0), padding),
        v_HDL=np.repeat(v_KDL, heads_per_group, axis=0),
        o_HMD=before.o_HMD,
    )


def pair_powers(before: HeadMatrices, moments: InputMoments) -> Real:
    """Return the power of the logits from each pair's principal components, [P, K], the largest first."""
    heads = _Heads.of(before, moments)
    return np.array([_components((pair,), heads)[0] for pair in range(before.q_HDX.shape[1] // 2)])


def _components(pairs: tuple[int, ...], heads: _Heads) -> tuple[Real, Complex, Complex, Complex]:
    """Return the principal components of some pairs of the keys, weighted by the queries.

    The error of a logit is the real part of q* e, for the error e of the pairs' keys, so its power is e* W e with W =
    E[q q*]. The components that lose least of it are those of W^½ k. Returns their powers and vectors, the largest
    first, W^½ and its inverse.
    """
    chosen = list(pairs)
    keys_FX, k_moment_FX = (
        of_keys[:, chosen].reshape(-1, of_keys.shape[2]) for of_keys in (heads.k_KPX, heads.k_moment_KPX)
    )
    q_HPX = heads.q_HPX[:, chosen]
    powers_HPP = heads.q_moment_HPX[:, chosen] @ q_HPX.conj().swapaxes(1, 2)
    power_FF = np.zeros((len(keys_FX), len(keys_FX)), dtype=np.complex128)
    for head, powers_GPP in enumerate(np.split(powers_HPP, len(heads.k_KPX))):
        own = slice(head * len(pairs), (head + 1) * len(pairs))
        power_FF[own, own] = powers_GPP.sum(axis=0)
    root_FF, inverse_FF = _roots(power_FF)
    values_F, vectors_FF = _largest(root_FF @ (k_moment_FX @ keys_FX.conj().T) @ root_FF)
    return values_F, vectors_FF, root_FF, inverse_FF


def _fill_channels(fold: Fold, heads: _Heads, query_HCX: Complex, key_CX: Complex, rest_KPX: Complex) -> None:
    """Fill the channels of a fold with the principal components of its pairs; subtract them from `rest_KPX`."""
    pairs, n_kv_heads = list(fold.pairs), len(heads.k_KPX)
    keys_FX = heads.k_KPX[:, pairs].reshape(-1, heads.k_KPX.shape[2])
    _, vectors_FF, root_FF, inverse_FF = _components(fold.pairs, heads)
    largest_FC = vectors_FF[:, : len(fold.channels)]
    shared_CX = largest_FC.conj().T @ root_FF @ keys_FX
    decoded_FC = inverse_FF @ largest_FC
    lengths_C = np.linalg.norm(shared_CX, axis=1)
    usual = np.linalg.norm(keys_FX) / np.sqrt(len(keys_FX))  # shared rows are as long as the source's
    scales_C = np.where(lengths_C > _NEGLIGIBLE * lengths_C.max(initial=0.0), lengths_C / (usual or 1.0), 1.0)
    channels = list(fold.channels)[: len(shared_CX)]
    key_CX[channels] = shared_CX / scales_C[:, None]
    rest_FX = keys_FX - decoded_FC @ shared_CX
    rest_FX[np.linalg.norm(rest_FX, axis=1) <= _ROUND_OFF * np.linalg.norm(keys_FX, axis=1)] = 0.0
    rest_KPX[:, pairs] = rest_FX.reshape(n_kv_heads, len(pairs), -1)
    decoded_KPC = decoded_FC.reshape(n_kv_heads, len(pairs), -1)
    for head, q_PX in enumerate(heads.q_HPX[:, pairs]):
        decode_PC = decoded_KPC[head * n_kv_heads // len(heads.q_HPX)] * scales_C
        query_HCX[head, channels] = decode_PC.conj().T @ q_PX


def _latent(
    before: HeadMatrices, rest_KDX: Real, moments: InputMoments, size: int, key_weight: float
) -> tuple[Real, Real, Real]:
    """Return the latent, [L, X], and what makes unrotated keys and values of it, [K, D, L] each.

    The latent minimises the squared errors of outputs plus those of logits, times `key_weight` and the head's output
    power, for inputs with the second moment of `moments.mixed_XX`.
    """
    heads_per_group = before.heads_per_group
    loss_XX = np.zeros_like(moments.mixed_XX)
    for head, (q_DX, o_MD) in enumerate(zip(before.q_HDX, before.o_HMD, strict=True)):
        key_DX, value_DX = rest_KDX[head // heads_per_group], before.v_KDX[head // heads_per_group]
        values_XX = value_DX.T @ (o_MD.T @ o_MD) @ value_DX
        queries_DD = q_DX @ moments.tokens_XX @ q_DX.T / len(q_DX)
        power = float((values_XX * moments.mixed_XX).sum())  # the output power that errors of the logits affect
        loss_XX += key_weight * power * key_DX.T @ queries_DD @ key_DX + values_XX
    root_XX, inverse_XX = moments.roots
    power_XX = root_XX @ loss_XX @ root_XX
    vectors_XL = _largest(power_XX)[1][:, :size]
    latent_LX, decoded_XL = vectors_XL.T @ inverse_XX, root_XX @ vectors_XL
    if latent_LX.shape[0] < size:
        latent_LX = np.pad(latent_LX, ((0, size - len(latent_LX)), (0, 0)))
        decoded_XL = np.pad(decoded_XL, ((0, 0), (0, size - decoded_XL.shape[1])))
    up_KUL = np.concatenate([rest_KDX, before.v_KDX], axis=1) @ decoded_XL
    lengths_L = np.linalg.norm(up_KUL, axis=(0, 1))  # on the moments, the latent's dimensions have unit variance
    up_KUL[:, :, lengths_L <= _ROUND_OFF * lengths_L.max()] = 0.0
    k_KDL, v_KDL = np.split(up_KUL, 2, axis=1)
    return latent_LX, k_KDL, v_KDL


def _largest(power: Matrix) -> tuple[Real, Matrix]:
    """Return the eigenvalues, the largest first, and their vectors as columns.

    The largest element of each vector is positive.
    """
    values, vectors = np.linalg.eigh((power + power.conj().T) / 2)
    values, vectors = values[::-1], vectors[:, ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return values, vectors * (largest.conj() / np.abs(largest))


def _roots(power: Matrix) -> tuple[Matrix, Matrix]:
    """Return the square root of a positive semidefinite matrix, and that root's pseudo-inverse."""
    values, vectors = np.linalg.eigh((power + power.conj().T) / 2)
    lengths = np.sqrt(np.maximum(values, 0.0))
    kept = lengths > np.sqrt(_NEGLIGIBLE) * lengths.max(initial=0.0)
    inverse = np.where(kept, 1 / np.where(kept, lengths, 1.0), 0.0)
    return (vectors * lengths) @ vectors.conj().T, (vectors * inverse) @ vectors.conj().T
