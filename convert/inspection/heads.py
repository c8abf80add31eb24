"""Measure the cosines of a model's K and V heads, layer by layer, and the losses of merging, by the weights alone.

H query heads, K key/value heads, D head_dim, F = K·D, P RoPE pairs, X inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from convert.errors import UnsupportedMethodError
from convert.layer_tensors.head_matrices import HeadMatrices, Real
from convert.merging.heads import compare_heads
from convert.merging.layer_merge import LayerMerge, read_attention
from convert.merging.merge_recipe import MergeRecipe
from convert.merging.methods import pca
from convert.merging.moments import (
    Maps,
    Moments,
    energies,
    key_pair_moments,
    moments_from_weights,
    relative_logit_error,
    relative_output_error,
    split_groups,
)
from convert.merging.norms import normalise
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import Checkpoint
from model.checkpoint.tensor import layer_number
from model.common.console import Advance
from model.common.errors import CheckpointError
from model.geometry import read_geometry


@dataclass(frozen=True)
class KeysValues:
    """One number for the K heads and one for the V heads."""

    k: float
    v: float

    @property
    def mean(self) -> float:
        return (self.k + self.v) / 2


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """Cosines and losses of one layer's heads."""

    layer: int
    raw: KeysValues
    """Mean cosine of two heads before alignment."""
    keys_KK: Real
    """Cosines of K heads after the best rotations of their RoPE pairs."""
    values_KK: Real
    """Cosines of V heads after the best rotation."""
    lost: dict[str, dict[int, KeysValues]]
    """Losses by method and number of groups: of keys as a share of the logits' energy, of values as a share of the
    output's."""

    @property
    def aligned(self) -> KeysValues:
        return KeysValues(_mean_of_pairs(self.keys_KK), _mean_of_pairs(self.values_KK))

    @property
    def mean_loss(self) -> float:
        """Mean pca loss over all numbers of groups. It ranks layers."""
        return float(np.mean([lost.mean for lost in self.lost["pca"].values()]))

    @property
    def record(self) -> dict[str, Any]:
        lost = [
            {"groups": groups, **{method: asdict(by_groups[groups]) for method, by_groups in self.lost.items()}}
            for groups in self.lost["pca"]
        ]
        return {"layer": self.layer, "raw": asdict(self.raw), "aligned": asdict(self.aligned), "lost": lost}


@dataclass(frozen=True)
class HeadReport:
    """The report on all layers, in order."""

    n_kv_heads: int
    groups: tuple[int, ...]
    """The numbers of groups that merge heads, in descending order."""
    layers: tuple[LayerHeads, ...]

    @property
    def worst(self) -> list[LayerHeads]:
        """The layers in descending order of loss."""
        return sorted(self.layers, key=lambda layer: -layer.mean_loss)

    @property
    def record(self) -> dict[str, Any]:
        """The report's entries for `--json`."""
        return {
            "layers": [layer.record for layer in self.layers],
            "worst_layers": [layer.layer for layer in self.worst],
        }


def head_layers(checkpoint: Checkpoint) -> tuple[LayerMerge, ...]:
    """Return the layers to report on.

    Raises CheckpointError if the family's heads cannot be aligned, or each layer has one K/V head.
    """
    geometry = read_geometry(checkpoint)
    if geometry.n_kv_heads == 1:
        raise CheckpointError(f"{checkpoint.path} has one K/V head in each layer; --heads has nothing to compare.")
    if geometry.n_rotary_pairs is None or geometry.family.is_encoder_decoder:
        raise CheckpointError(
            "--heads rotates heads to compare them, which is not implemented for the attention of "
            f"model_type {geometry.family.model_type!r}; leave --heads out."
        )
    try:
        return make_merge_plan(checkpoint, geometry.legal_n_kv_heads[-2], MergeRecipe("pca"), None).conversions
    except UnsupportedMethodError as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(f"--heads maps heads as --method pca does: {reason}; leave --heads out.") from error


def report_heads(checkpoint: Checkpoint, merges: Sequence[LayerMerge], advance: Advance) -> HeadReport:
    """Report on each layer. `advance` counts layers. Raises CheckpointError if a weight is NaN or infinite."""
    n_kv_heads, *fewer = reversed(read_geometry(checkpoint).legal_n_kv_heads)
    layers = []
    for merge in merges:
        attention = normalise(read_attention(checkpoint, merge), merge.norms)
        layers.append(_report_layer(attention, merge, fewer))
        advance(1)
    return HeadReport(n_kv_heads, tuple(fewer), tuple(layers))


def _report_layer(attention: HeadMatrices, merge: LayerMerge, groups: list[int]) -> LayerHeads:
    number = layer_number(merge.weights[0])
    assert number is not None
    whole = moments_from_weights(attention)
    return LayerHeads(
        number,
        KeysValues(
            _raw_cosine(attention.k_KDX, merge.source_heads[1].tensor_names[0]),
            _raw_cosine(attention.v_KDX, merge.source_heads[2].tensor_names[0]),
        ),
        *_similarities(whole),
        {method: {n: _loss(split_groups(whole, n), maps) for n in groups} for method, maps in _MERGES.items()},
    )


def _raw_cosine(heads_KDX: Real, name: str) -> float:
    return float(compare_heads(heads_KDX.reshape(len(heads_KDX), -1), name)[1])


def _similarities(whole: Moments) -> tuple[Real, Real]:
    """Return the cosines of each pair of key heads and of value heads after alignment, [K, K] each.

    Keys are aligned by a rotation of each RoPE pair, values by one rotation (Jin et al., arXiv:2412.20677, section 3).
    """
    n, size = whole.n_keys, whole.head_dim
    pairs_PKK = key_pair_moments(whole)
    keys_KDKD = whole.keys_FF.reshape(n, size, n, size)
    unrotated = slice(2 * whole.n_rotary_pairs, size)
    keys_KK = np.abs(pairs_PKK).sum(axis=0) + _nuclear(keys_KDKD[:, unrotated, :, unrotated])
    values_KK = _nuclear(whole.values_FF.reshape(n, size, n, size))
    return _cosines(keys_KK), _cosines(values_KK)


def _nuclear(heads_KDKD: Real) -> Real:
    """Return the maximum trace of each two heads' product under rotation: the sum of its singular values, [K, K]."""
    if heads_KDKD.shape[1] == 0:
        return np.zeros((len(heads_KDKD), len(heads_KDKD)))
    sums: Real = np.linalg.svd(heads_KDKD.transpose(0, 2, 1, 3), compute_uv=False).sum(axis=-1)
    return sums


def _cosines(products_KK: Real) -> Real:
    lengths_K = np.sqrt(np.diagonal(products_KK))
    cosines: Real = products_KK / np.maximum(np.outer(lengths_K, lengths_K), 1e-300)
    return cosines


def _mean_of_pairs(cosines_KK: Real) -> float:
    return float(cosines_KK[~np.eye(len(cosines_KK), dtype=bool)].mean())


def _loss(groups: list[Moments], merge: Callable[[Moments], Maps]) -> KeysValues:
    """Return a layer's loss over all groups, each weighted by its energy."""
    lost, whole = np.zeros(2), np.zeros(2)
    for moments in groups:
        maps, energy = merge(moments), np.array(energies(moments))
        lost += energy * (relative_logit_error(moments, maps), relative_output_error(moments, maps))
        whole += energy
    share_2 = np.maximum(lost, 0) / np.where(whole > 0, whole, 1)
    return KeysValues(*map(float, share_2))


def _mean(moments: Moments) -> Maps:
    """Return the maps of `--method mean`: the mean head replaces each head, and queries and outputs stay."""
    n, size = moments.n_keys, moments.head_dim
    mean_DF = np.tile(np.eye(size), n) / n
    same_HDD = np.tile(np.eye(size), (len(moments.queries_HDD), 1, 1))
    return Maps(mean_DF, same_HDD, mean_DF, same_HDD)


_MERGES: dict[str, Callable[[Moments], Maps]] = {"mean": _mean, "pca": pca.merge}
