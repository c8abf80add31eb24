"""Merge layers by what their heads do on a text: one pass through the model, one layer in memory at a time.

The states between layers lie on the disk, so that memory does not grow with the text:

    FOLDER/states-0012.npy                 what goes into layer 12, float32 [windows, tokens, hidden]
    FOLDER/model.layers.11….q_proj.npz     layer 11, merged

A killed pass goes on at the layer whose states it has. Letters: N windows, T tokens, M hidden size, H query heads, K
key/value heads, D head_dim, G groups, F the keys or values of a group side by side, S sampled queries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convert.attention import LayerAttention, Real
from convert.grouping import reorder, similar_order
from convert.layer_merge import LayerMerge, finish_layer, merge_attention, read_attention, save_layer
from convert.moments import Moments, of_weights
from convert.refit import refit_output
from convert.sample import Sample
from model.attention import Mask, attend
from model.checkpoint import Checkpoint
from model.llama import Block, Rotation
from model.llama_config import LlamaConfig, read_llama_config
from model.loading import load_block, load_embedding
from model.masks import text_mask
from model.rope import rotate, rotations

KEY_QUERIES = 1024
"""Queries of a group from which its keys are looked at, over the whole text."""
VALUES_EVERY = 8
"""Of how many queries one is taken to look at what attention makes of the values."""
_BATCH_TOKENS = 4096

Progress = Callable[[int], None]


def calibrate_layers(
    checkpoint: Checkpoint, merges: list[LayerMerge], sample: Sample, folder: Path, progress: Progress
) -> None:  # fmt: skip
    """Leave every layer merged in `folder`. Progress counts tokens, once for each layer."""
    config = read_llama_config(checkpoint.config)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "finished").exists():
        return
    text = _Text(config, sample)
    with torch.inference_mode():
        first = _begin(checkpoint, sample, folder)
        progress(first * sample.n_tokens)
        for index in range(first, len(merges)):
            states_NTM = np.load(_states(folder, index), mmap_mode="r")
            assert f"layers.{index}." in merges[index].weights[0]
            block = load_block(checkpoint, config, index)
            _merge(checkpoint, merges[index], block, _Layer(text, index, block, states_NTM), folder)
            _advance(block, text, index, states_NTM, folder, progress)
            _states(folder, index).unlink()
    (folder / "finished").touch()
    _states(folder, len(merges)).unlink()


def _states(folder: Path, index: int) -> Path:
    return folder / f"states-{index:04}.npy"


def _begin(checkpoint: Checkpoint, sample: Sample, folder: Path) -> int:
    """Return the layer to go on with: the first one, with the embeddings as its states, if there are none yet."""
    kept = sorted(folder.glob("states-*.npy"))
    for old in kept[:-1]:
        old.unlink()
    if kept:
        return int(kept[-1].stem.removeprefix("states-"))
    embedding_VM = load_embedding(checkpoint)
    assert sample.ids_NT is not None
    shape = (sample.n_windows, sample.window, embedding_VM.shape[1])
    with _Writer(_states(folder, 0), shape) as states_NTM:
        for n, ids_T in enumerate(sample.ids_NT):
            states_NTM[n] = embedding_VM[torch.from_numpy(ids_T)].float().numpy()
    return 0


class _Writer:
    """An array on the disk that takes its name when it is complete."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self._path, self._partial, self._shape = path, path.with_suffix(".partial"), shape

    def __enter__(self) -> "np.memmap[tuple[int, ...], np.dtype[np.float32]]":
        self._array = np.lib.format.open_memmap(self._partial, mode="w+", dtype=np.float32, shape=self._shape)
        return self._array

    def __exit__(self, kind: object, *rest: object) -> None:
        self._array.flush()
        del self._array
        if kind is None:
            self._partial.rename(self._path)


class _Text:
    """What is the same in all layers: geometry, rotary angles, masks."""

    def __init__(self, config: LlamaConfig, sample: Sample) -> None:
        self.config, self.n_windows, self.length = config, sample.n_windows, sample.window
        positions_1T = torch.arange(self.length)[None]
        self.rotation: Rotation = rotations(config.rope, positions_1T, self.length, torch.float32)
        self.batch = max(1, _BATCH_TOKENS // self.length)

    def mask(self, index: int, n_rows: int) -> Mask:
        return text_mask(n_rows, 0, self.length, self.config.windows[index], None, torch.device("cpu"))


def _advance(
    block: Block, text: _Text, index: int, states_NTM: np.ndarray, folder: Path, progress: Progress
) -> None:  # fmt: skip
    """Write what the layer, as it was, makes of its states."""
    with _Writer(_states(folder, index + 1), states_NTM.shape) as next_NTM:
        for rows in _batches(text):
            x_BTM = torch.from_numpy(states_NTM[rows].copy())
            next_NTM[rows] = block(x_BTM, text.rotation, text.mask(index, len(x_BTM))).numpy()
            progress(x_BTM.shape[0] * x_BTM.shape[1])


def _batches(text: _Text) -> Iterator[slice]:
    for start in range(0, text.n_windows, text.batch):
        yield slice(start, min(start + text.batch, text.n_windows))


@dataclass(frozen=True)
class _Layer:
    """One layer and what goes into it."""

    text: _Text
    index: int
    block: Block
    states_NTM: np.ndarray

    def inputs(self) -> Iterator[Tensor]:
        """Yield what the layer's attention reads, a batch of windows at a time, [B, T, M]."""
        for rows in _batches(self.text):
            yield self.block.input_layernorm(torch.from_numpy(self.states_NTM[rows].copy()))

    def answers(self, merged: LayerAttention) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each window what the merged heads give, [T, H·D], and what the layer gives as it is, [T, M]."""
        rows = [torch.from_numpy(heads.reshape(-1, heads.shape[2])).float() for heads in _queries_keys_values(merged)]
        for x_BTM in self.inputs():
            mask = self.text.mask(self.index, len(x_BTM))
            whole_BTM = self.block.self_attn(x_BTM, self.text.rotation, mask, None, 0)
            bias_M = self.block.self_attn.o_proj.bias
            target_BTM = whole_BTM if bias_M is None else whole_BTM - bias_M
            q_BTHD, k_BTGD, v_BTGD = (self._project(x_BTM, weight) for weight in rows)
            q_BTHD, k_BTGD = (rotate(heads, *self.text.rotation) for heads in (q_BTHD, k_BTGD))
            yield from zip(attend(q_BTHD, k_BTGD, v_BTGD, mask).flatten(2), target_BTM, strict=True)

    def _project(self, x_BTM: Tensor, rows_CX: Tensor) -> Tensor:
        weight_CM, bias_C = rows_CX[:, : x_BTM.shape[2]], rows_CX[:, x_BTM.shape[2] :].flatten()
        heads_BTC: Tensor = F.linear(x_BTM, weight_CM, bias_C if len(bias_C) else None)
        return heads_BTC.view(*x_BTM.shape[:2], -1, self.text.config.head_dim)


def _queries_keys_values(attention: LayerAttention) -> tuple[Real, Real, Real]:
    return attention.q_HDX, attention.k_KDX, attention.v_KDX


def _merge(checkpoint: Checkpoint, merge: LayerMerge, block: Block, layer: _Layer, folder: Path) -> None:
    before = read_attention(checkpoint, merge)
    order = list(range(len(before.k_KDX)))
    if merge.recipe.grouping == "similar":
        order = similar_order(of_weights(before, _root(layer, before)), merge.n_kv_heads)
        before = reorder(before, order)
    sums = _Sums(layer, merge.n_kv_heads, order)
    for x_BTM in layer.inputs():
        sums.add(x_BTM)
    outputs_HDD = before.o_HMD.transpose(0, 2, 1) @ before.o_HMD
    after = merge_attention(before, sums.moments(outputs_HDD, before.n_planes), merge.recipe)
    if merge.recipe.refit:
        after = refit_output(after, layer.answers(after))
    save_layer(finish_layer(checkpoint, merge, before, after), merge, folder)


def _root(layer: _Layer, attention: LayerAttention) -> Real:
    """Return a root of the second moments of what a layer's attention reads, and of the constant 1 beside it."""
    n_columns = attention.q_HDX.shape[2]
    sum_XX = torch.zeros(n_columns, n_columns, dtype=torch.float64)
    for x_BTM in layer.inputs():
        x_NX = F.pad(x_BTM.flatten(0, 1).double(), (0, n_columns - x_BTM.shape[2]), value=1.0)
        sum_XX += x_NX.T @ x_NX
    floor = 1e-9 * sum_XX.diagonal().mean()
    root: Real = torch.linalg.cholesky(sum_XX + floor * torch.eye(n_columns, dtype=torch.float64)).numpy()
    return root


class _Sums:
    """The second moments of a layer's heads, added up window by window in float64."""

    def __init__(self, layer: _Layer, n_kv_heads: int, order: list[int]) -> None:
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
        per_window = self._per_group * layer.text.n_windows
        self._key_queries = min(-(-KEY_QUERIES // per_window), layer.text.length // VALUES_EVERY)

    def add(self, x_BTM: Tensor) -> None:
        attention, shape = self._layer.block.self_attn, (*x_BTM.shape[:2], -1, self._size)
        q_BTHD = attention.q_proj(x_BTM).view(shape).unflatten(2, (-1, self._per_key))[:, :, self._order].flatten(2, 3)
        k_BTKD, v_BTKD = (proj(x_BTM).view(shape)[:, :, self._order] for proj in (attention.k_proj, attention.v_proj))
        turned_q_BTHD = rotate(q_BTHD, *self._layer.text.rotation)
        turned_k_BTKD = rotate(k_BTKD, *self._layer.text.rotation)
        q_HND = q_BTHD.flatten(0, 1).transpose(0, 1).double()
        self._queries_HDD += q_HND.mT @ q_HND
        for window in range(len(x_BTM)):
            at_S = torch.from_numpy(self._rng.permutation(x_BTM.shape[1])[: x_BTM.shape[1] // VALUES_EVERY])
            k_KTD, v_KTD = turned_k_BTKD[window].transpose(0, 1), v_BTKD[window].transpose(0, 1)
            weights_HST = self._weights(turned_q_BTHD[window, at_S].transpose(0, 1), k_KTD, at_S)
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
        """Look at the keys as the queries meet them: from their mean, turned, by attention."""
        keys_GTF = self._grouped(k_KTD)
        for head, weights_ST in enumerate(weights_HST):
            group = head // self._per_group
            apart_STF = keys_GTF[group] - (weights_ST @ keys_GTF[group])[:, None]
            apart_STF *= weights_ST.sqrt()[..., None]
            met_SFF = self._turned_back(self._turned_back(apart_STF.mT @ apart_STF, at_S).mT, at_S)
            self._keys_GFF[group] += met_SFF.double().mean(dim=0) / self._per_group

    def _turned_back(self, moments_SFF: Tensor, at_S: Tensor) -> Tensor:
        """Turn the second index from the keys' own positions to how far they are from the query."""
        cos_TD, sin_TD = (x[0, :, 0] for x in self._layer.text.rotation)
        heads_SFKD = moments_SFF.reshape(*moments_SFF.shape[:2], -1, self._size)
        return rotate(heads_SFKD, cos_TD[at_S][:, None, None], -sin_TD[at_S][:, None, None]).flatten(2)

    def moments(self, outputs_HDD: np.ndarray, n_planes: int) -> list[Moments]:
        n_windows = self._layer.text.n_windows
        queries_HDD = self._queries_HDD.numpy() / (n_windows * self._layer.text.length)
        found = []
        for group in range(self._n_groups):
            heads = slice(group * self._per_group, (group + 1) * self._per_group)
            keys_FF, values_FF = (x[group].numpy() / n_windows for x in (self._keys_GFF, self._values_GFF))
            found.append(Moments(queries_HDD[heads], keys_FF, values_FF, outputs_HDD[heads], n_planes))
        return found
