"""Accumulate the second moments of a layer's heads on a text.

Letters: B windows in a batch, T tokens, H query heads, K key/value heads, D head_dim, G groups, F the keys or values of
a group side by side, R rotated dimensions of a head, S sampled queries of a head, N those of a group, Q those of all
groups, C keys drawn for each query, P those of several queries (N·C).
"""

import numpy as np
import torch
from torch import Tensor

from convert.calibration.query_draws import QueryDraws
from convert.layers.layer_stream import CalibrationLayer
from convert.layers.runnable_layer import HeadStates
from convert.merging.moments import Moments
from model.common.errors import CheckpointError
from model.decoder.devices import float64_device, to_float64
from model.decoder.rope import rotate_first

KEY_QUERIES = 4096
"""Queries sampled per group for the key moments, over the whole text."""
KEYS_PER_GROUP_QUERY = 64
"""Keys drawn for each of them. Each serves all key heads of the group."""
VALUE_QUERIES = 2048
"""Queries sampled per head for the value moments, over the whole text."""
_DRAWN_VALUES = 1 << 22
"""Elements of drawn keys that are rotated at a time."""
_ROUNDING = 1e-3
"""How far a sum of attention weights may be from 1 without an attention sink."""


class HeadSums:
    """The second moments of a layer's heads, summed over windows in float64."""

    def __init__(self, layer: CalibrationLayer, n_kv_heads: int, raw_keys: bool = False) -> None:
        runnable = layer.runnable
        self._layer, self._n_groups = layer, n_kv_heads
        self._size = runnable.head_dim
        self._heads_per_group = runnable.n_heads // n_kv_heads
        width = runnable.n_kv_heads // n_kv_heads * runnable.head_dim
        sums_device = float64_device(runnable.device)
        zeros = torch.zeros(n_kv_heads, width, width, dtype=torch.float64, device=sums_device)
        self._keys_GFF, self._values_GFF = zeros, zeros.clone()
        self._raw_keys_GFF = zeros.clone() if raw_keys else None
        self._scales_2K = zeros.new_zeros(2, runnable.n_kv_heads)
        self._queries_HDD = zeros.new_zeros(runnable.n_heads, runnable.head_dim, runnable.head_dim)
        self._draws = QueryDraws(layer, VALUE_QUERIES)
        key_queries = -(-KEY_QUERIES // (self._heads_per_group * layer.windows.n_windows))
        self._key_queries = min(key_queries, self._draws.per_window)

    def add(self, heads: HeadStates) -> None:
        """Add a batch of windows. Call it in the order of `CalibrationWindows.batches`, as `layer.run` does."""
        runnable, rotated_k_BTKD = self._layer.runnable, heads.rotated_k_BTKD
        q_HND = to_float64(heads.q_BTHD.flatten(0, 1).transpose(0, 1))
        self._queries_HDD += q_HND.mT @ q_HND
        if heads.key_scales_BTK is not None:
            self._add_key_scales(rotated_k_BTKD, heads.key_scales_BTK)
        if self._raw_keys_GFF is not None:
            keys_GNF = self._grouped(runnable.unrotated(rotated_k_BTKD).flatten(0, 1).transpose(0, 1))
            self._raw_keys_GFF += to_float64(keys_GNF.mT @ keys_GNF)
        for window, q_THD in enumerate(heads.rotated_q_BTHD):
            at_S, weights_HST = self._draws.queries(q_THD, rotated_k_BTKD[window])
            k_KTD, v_KTD = rotated_k_BTKD[window].transpose(0, 1), heads.v_BTKD[window].transpose(0, 1)
            self._add_values(weights_HST, v_KTD)
            at_S = at_S[: self._key_queries]
            self._add_keys(weights_HST[:, : len(at_S)], k_KTD, at_S)

    def _grouped(self, heads_KTD: Tensor) -> Tensor:
        """Return the keys or values of each group side by side, [G, T, F]."""
        return heads_KTD.view(self._n_groups, -1, *heads_KTD.shape[1:]).transpose(1, 2).flatten(2)

    def _add_values(self, weights_HST: Tensor, v_KTD: Tensor) -> None:
        """Accumulate the second moments of the values mixed by attention."""
        weights_GNT = weights_HST.reshape(self._n_groups, -1, v_KTD.shape[1])
        mixed_GNF = to_float64(weights_GNT @ self._grouped(v_KTD))
        self._values_GFF += mixed_GNF.mT @ mixed_GNF / weights_GNT.shape[1]

    def _add_keys(self, weights_HST: Tensor, k_KTD: Tensor, at_S: Tensor) -> None:
        """Accumulate the attention-weighted covariance of keys rotated to the query's position."""
        n_keys, at_N = k_KTD.shape[1], at_S.repeat(self._heads_per_group)
        weights_QT = _among_keys(weights_HST.reshape(-1, n_keys), at_N.repeat(self._n_groups))
        drawn_QC = self._draws.keys(weights_QT, KEYS_PER_GROUP_QUERY)
        groups = (each.view(self._n_groups, len(at_N), -1) for each in (weights_QT, drawn_QC.to(k_KTD.device)))
        keys_GTF = self._grouped(k_KTD)
        for group, (weights_NT, drawn_NC, keys_TF) in enumerate(zip(*groups, keys_GTF, strict=True)):
            mean_NF = weights_NT @ keys_TF
            step = max(1, _DRAWN_VALUES // (KEYS_PER_GROUP_QUERY * keys_TF.shape[1]))
            for part in (slice(start, start + step) for start in range(0, len(at_N), step)):
                centred_NCF = keys_TF[drawn_NC[part]] - mean_NF[part, None]
                rotated_PF = self._rotated_back(centred_NCF, at_N[part]).flatten(0, 1)
                self._keys_GFF[group] += to_float64(rotated_PF.mT @ rotated_PF) / (len(at_N) * KEYS_PER_GROUP_QUERY)

    def _add_key_scales(self, k_BTKD: Tensor, scales_BTK: Tensor) -> None:
        """Accumulate the two sums of a least-squares fit of the keys by the keys without their scales."""
        power_BTK = k_BTKD.square().sum(dim=3)
        for i in range(2):
            power_BTK = power_BTK / scales_BTK
            self._scales_2K[i] += to_float64(power_BTK).sum(dim=(0, 1))

    @property
    def key_scales(self) -> np.ndarray | None:
        """The mean factors of the keys by norms of each head, [K]; None if they do not differ."""
        products_K, powers_K = self._scales_2K.cpu()
        return (products_K / powers_K).nan_to_num(1.0).numpy() if powers_K.any() else None

    def _rotated_back(self, keys_NCF: Tensor, at_N: Tensor) -> Tensor:
        """Rotate keys from their own positions to their distances from the query.

        Multiplies by RoPE's attention factor, which the keys have already, a second time, for the queries: a merge maps
        queries before RoPE, so their moments lack it.
        """
        runnable = self._layer.runnable
        if runnable.rotation is None:
            return keys_NCF
        cos_TR, sin_TR = runnable.rotation
        heads_NCKD = keys_NCF.reshape(*keys_NCF.shape[:2], -1, self._size)
        rotated_NCKD = rotate_first(heads_NCKD, cos_TR[at_N][:, None, None], -sin_TR[at_N][:, None, None])
        return runnable.scale_rotated(rotated_NCKD, runnable.attention_scaling).flatten(2)

    def moments(self, outputs_HDD: np.ndarray, n_rotary_pairs: int) -> list[Moments]:
        """Return the moments of each group: means over the windows, of queries and raw keys over their tokens.

        Call once, after all `add`s.
        """
        n_windows = self._layer.windows.n_windows
        queries_HDD = self._queries_HDD.cpu().numpy() / (n_windows * self._layer.windows.window_tokens)
        for sums in (self._keys_GFF, self._values_GFF, self._queries_HDD):
            if not sums.isfinite().all():
                raise CheckpointError(
                    f"the queries, keys or values of layer {self._layer.index} are so large that their squares are "
                    "infinite; use --method mean."
                )
        for sums_GFF in (self._keys_GFF, self._values_GFF):
            sums_GFF /= n_windows  # in place: with one group they are large
        if self._raw_keys_GFF is not None:
            self._raw_keys_GFF /= n_windows * self._layer.windows.window_tokens
        moments = []
        for group in range(self._n_groups):
            heads = slice(group * self._heads_per_group, (group + 1) * self._heads_per_group)
            keys_FF, values_FF = (x[group].cpu().numpy() for x in (self._keys_GFF, self._values_GFF))
            raw_FF = None if self._raw_keys_GFF is None else self._raw_keys_GFF[group].cpu().numpy()
            moments.append(Moments(queries_HDD[heads], keys_FF, values_FF, outputs_HDD[heads], n_rotary_pairs, raw_FF))
        return moments


def _among_keys(weights_NT: Tensor, at_N: Tensor) -> Tensor:
    """Return attention weights as shares of what the keys get: an attention sink takes the rest, or nearly all.

    A query whose keys get nothing is taken to attend to its own position.
    """
    sums_N1 = weights_NT.sum(dim=1, keepdim=True)
    if sums_N1.min() > 1 - _ROUNDING:
        return weights_NT
    shares_NT = weights_NT / sums_N1.clamp_min(torch.finfo(sums_N1.dtype).tiny)
    nothing_N = shares_NT.sum(dim=1) < 0.5
    shares_NT[nothing_N, at_N[nothing_N]] = 1.0
    return shares_NT
