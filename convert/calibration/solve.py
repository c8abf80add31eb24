"""Merge layers by what their heads do on a text.

    FOLDER/model.layers.11….q_proj.npz     layer 11, merged

Letters: N windows, B of them together, T tokens, M hidden size, H query heads, K key/value heads, D head_dim, G groups,
F the keys or values of a group side by side, S sampled queries, C keys drawn for each.
"""

from collections.abc import Callable, Container, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convert.calibration.layer_output import outputs, squared_error, weights_of
from convert.calibration.layer_stream import Heads, Layer, Progress, iter_layers, last_states
from convert.calibration.refine import refine
from convert.calibration.refit import is_held_out, refit_output
from convert.calibration.text import CalibrationText
from convert.merging.grouping import reorder, similar_order
from convert.merging.layer import LayerMerge, apply_maps, finish_layer, read_attention, save_layer
from convert.merging.methods import find_group_method, fit
from convert.merging.moments import Moments, moments_from_weights
from convert.merging.weights import LayerAttention, Real
from convert.planning.recipe import Recipe
from model.checkpoint import Checkpoint
from model.common.files import sync_folder
from model.decoder.rope import rotate

KEY_QUERIES = 4096
"""Queries of a group from which its keys are looked at, over the whole text."""
KEYS_DRAWN = 64
"""How many keys each of them looks at."""
VALUE_QUERIES = 2048
"""Queries of a head from which it is looked at what attention makes of the values, over the whole text."""
_DRAWN_VALUES = 1 << 22
"""Of keys drawn, how many numbers are turned at a time."""
JUDGED_TOKENS = 4096
"""Held-out tokens, at most, on which solutions are compared."""


@torch.no_grad()
def calibrate_layers(
    checkpoint: Checkpoint, merges: list[LayerMerge], sample: CalibrationText, folder: Path, progress: Progress
) -> None:  # fmt: skip
    """Leave every layer merged in `folder`. Progress counts tokens, once for each layer.

    What was killed goes on at the layer it was at.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "finished").exists():
        return
    for layer in iter_layers(checkpoint, sample, folder, progress):
        assert f"layers.{layer.index}." in merges[layer.index].weights[0]
        _merge(checkpoint, merges[layer.index], layer, folder)
    sync_folder(folder)
    (folder / "finished").touch()
    last_states(checkpoint, folder).unlink()


@torch.no_grad()
def held_out_errors(
    checkpoint: Checkpoint,
    sample: CalibrationText,
    folder: Path,
    indices: Container[int],
    versions: Callable[[int], Sequence[LayerAttention]],
) -> dict[int, list[float]]:
    """Return how far versions of some layers, given by their index, are from what these layers gave before."""
    folder.mkdir(parents=True)
    errors = {}
    for layer in iter_layers(checkpoint, sample, folder, lambda n: None):
        layer.attend(lambda heads: None)
        if layer.index in indices:
            windows = [n for n in range(layer.text.n_windows) if is_held_out(n)]
            found = versions(layer.index)
            errors[layer.index] = [squared_error(layer, weights_of(attention), windows) for attention in found]
    return errors


def _merge(checkpoint: Checkpoint, merge: LayerMerge, layer: Layer, folder: Path) -> None:
    before = read_attention(checkpoint, merge)
    order = list(range(len(before.k_KDX)))
    if merge.recipe.grouping == "similar":
        order = similar_order(moments_from_weights(before, _root(layer, before)), merge.n_kv_heads)
        before = reorder(before, order)
    sums = _Sums(layer, merge.n_kv_heads, order)
    layer.attend(sums.add)
    outputs_HDD = before.o_HMD.transpose(0, 2, 1) @ before.o_HMD
    after = _best(layer, before, sums.moments(outputs_HDD, before.n_rotary_pairs), merge.recipe)
    if merge.recipe.refit:
        after = refit_output(after, outputs(layer, after, range(layer.text.n_windows)))
    if merge.recipe.refine:
        after = refine(layer, after, merge.recipe.refine)
    save_layer(finish_layer(checkpoint, merge, before, after), merge, folder)


def _best(layer: Layer, before: LayerAttention, moments: list[Moments], recipe: Recipe) -> LayerAttention:
    """Return the merged layer; where a method has several solutions, the one nearest to the old output, held out."""
    maps = [find_group_method(recipe.method)(known) for known in moments]
    best = apply_maps(before, moments, maps, recipe)
    if recipe.method != "fit":
        return best
    windows = [n for n in range(layer.text.n_windows) if is_held_out(n)][: -(-JUDGED_TOKENS // layer.text.length)]
    least = squared_error(layer, weights_of(best), windows)
    groups = zip(moments, maps, before.groups(len(moments)), strict=True)
    others = [fit.alternatives(known, found, moments_from_weights(group)) for known, found, group in groups]
    for other in zip(*others, strict=True):
        merged = apply_maps(before, moments, list(other), recipe)
        error = squared_error(layer, weights_of(merged), windows)
        if error < least:
            best, least = merged, error
    return best


def _root(layer: Layer, attention: LayerAttention) -> Real:
    """Return a root of the second moments of what a layer's attention reads, and of the constant 1 beside it."""
    n_columns = attention.q_HDX.shape[2]
    sum_XX = torch.zeros(n_columns, n_columns, dtype=torch.float64)
    for windows in layer.text.batches():
        x_BTM = layer.inputs(windows)
        x_NX = F.pad(x_BTM.flatten(0, 1).double(), (0, n_columns - x_BTM.shape[2]), value=1.0)
        sum_XX += x_NX.T @ x_NX
    floor = 1e-9 * float(sum_XX.diagonal().mean()) or 1.0
    root: Real = torch.linalg.cholesky(sum_XX + floor * torch.eye(n_columns, dtype=torch.float64)).numpy()
    return root


class _Sums:
    """The second moments of a layer's heads, added up window by window in float64."""

    def __init__(self, layer: Layer, n_kv_heads: int, order: list[int]) -> None:
        config = layer.text.config
        self._layer, self._n_groups = layer, n_kv_heads
        self._size, self._n_heads = config.head_dim, config.n_heads
        self._per_key, self._per_group = config.n_heads // config.n_kv_heads, config.n_heads // n_kv_heads
        width = config.n_kv_heads // n_kv_heads * config.head_dim
        zeros = torch.zeros(n_kv_heads, width, width, dtype=torch.float64)
        self._keys_GFF, self._values_GFF = zeros, zeros.clone()
        self._queries_HDD = torch.zeros(config.n_heads, config.head_dim, config.head_dim, dtype=torch.float64)
        self._order = order
        self._rng = np.random.default_rng(layer.index)
        self._draws = torch.Generator().manual_seed(layer.index)
        per_window = self._per_group * layer.text.n_windows
        self._queries = min(-(-VALUE_QUERIES // layer.text.n_windows), layer.text.length)
        self._key_queries = min(-(-KEY_QUERIES // per_window), self._queries)

    def add(self, heads: Heads) -> None:
        q_BTHD, rotated_q_BTHD = (
            x.view(*x.shape[:2], -1, self._per_key, self._size)[:, :, self._order].flatten(2, 3)
            for x in (heads.q_BTHD, heads.rotated_q_BTHD)
        )
        rotated_k_BTKD, v_BTKD = (x[:, :, self._order] for x in (heads.rotated_k_BTGD, heads.v_BTGD))
        q_HND = q_BTHD.flatten(0, 1).transpose(0, 1).double()
        self._queries_HDD += q_HND.mT @ q_HND
        for window in range(len(q_BTHD)):
            at_S = torch.from_numpy(self._rng.permutation(q_BTHD.shape[1])[: self._queries])
            k_KTD, v_KTD = rotated_k_BTKD[window].transpose(0, 1), v_BTKD[window].transpose(0, 1)
            weights_HST = self._weights(rotated_q_BTHD[window, at_S].transpose(0, 1), k_KTD, at_S)
            self._add_values(weights_HST, v_KTD)
            at_S = at_S[: self._key_queries]
            self._add_keys(weights_HST[:, : len(at_S)], k_KTD, at_S)

    def _weights(self, q_HSD: Tensor, k_KTD: Tensor, at_S: Tensor) -> Tensor:
        """Return how much attention each token gets from the sampled queries, [H, S, T]."""
        length = k_KTD.shape[1]
        q_KND = q_HSD.reshape(len(k_KTD), -1, self._size)
        logits_HST: Tensor = (q_KND @ k_KTD.mT).view(self._n_heads, -1, length) * self._size**-0.5
        distance_ST = at_S[:, None] - torch.arange(length)
        seen_ST = distance_ST >= 0
        window = self._layer.text.config.windows[self._layer.index]
        if window is not None:
            seen_ST &= distance_ST < window
        return logits_HST.masked_fill(~seen_ST, float("-inf")).softmax(dim=-1)

    def _grouped(self, heads_KTD: Tensor) -> Tensor:
        """Return the keys or values of each group side by side, [G, T, F]."""
        return heads_KTD.view(self._n_groups, -1, *heads_KTD.shape[1:]).transpose(1, 2).flatten(2)

    def _add_values(self, weights_HST: Tensor, v_KTD: Tensor) -> None:
        """Look at what attention makes of the values."""
        weights_GNT = weights_HST.reshape(self._n_groups, -1, v_KTD.shape[1])
        mixed_GNF = (weights_GNT @ self._grouped(v_KTD)).double()
        self._values_GFF += mixed_GNF.mT @ mixed_GNF / weights_GNT.shape[1]

    def _add_keys(self, weights_HST: Tensor, k_KTD: Tensor, at_S: Tensor) -> None:
        """Look at the keys as the queries meet them: from their mean, turned, as often as attention goes to them."""
        for group, weights_NT in enumerate(weights_HST.reshape(self._n_groups, -1, k_KTD.shape[1])):
            keys_TF = self._grouped(k_KTD)[group]
            drawn_NC = torch.multinomial(weights_NT, KEYS_DRAWN, replacement=True, generator=self._draws)
            mean_NF, at_N = weights_NT @ keys_TF, at_S.repeat(self._per_group)
            for part in torch.split(torch.arange(len(at_N)), max(1, _DRAWN_VALUES // (KEYS_DRAWN * keys_TF.shape[1]))):
                apart_NCF = keys_TF[drawn_NC[part]] - mean_NF[part, None]
                met_XF = self._rotated_back(apart_NCF, at_N[part]).flatten(0, 1)
                self._keys_GFF[group] += (met_XF.mT @ met_XF).double() / (len(at_N) * KEYS_DRAWN)

    def _rotated_back(self, keys_NCF: Tensor, at_N: Tensor) -> Tensor:
        """Turn keys from their own positions to how far they are from the query."""
        cos_TD, sin_TD = (x[0, :, 0] for x in self._layer.text.rotation)
        heads_NCKD = keys_NCF.reshape(*keys_NCF.shape[:2], -1, self._size)
        return rotate(heads_NCKD, cos_TD[at_N][:, None, None], -sin_TD[at_N][:, None, None]).flatten(2)

    def moments(self, outputs_HDD: np.ndarray, n_rotary_pairs: int) -> list[Moments]:
        n_windows = self._layer.text.n_windows
        queries_HDD = self._queries_HDD.numpy() / (n_windows * self._layer.text.length)
        for sums_GFF in (self._keys_GFF, self._values_GFF):
            sums_GFF /= n_windows  # in place: with one group they are large
        found = []
        for group in range(self._n_groups):
            heads = slice(group * self._per_group, (group + 1) * self._per_group)
            keys_FF, values_FF = (x[group].numpy() for x in (self._keys_GFF, self._values_GFF))
            found.append(Moments(queries_HDD[heads], keys_FF, values_FF, outputs_HDD[heads], n_rotary_pairs))
        return found
