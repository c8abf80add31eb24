"""A text's way through a model, one layer in memory at a time.

The states between layers lie on the disk, so that memory grows neither with the text nor with the model's depth:

    FOLDER/states-0012.npy      what goes into layer 12, float32 [windows, tokens, hidden]

A walk that was killed goes on at the layer whose states it has. Letters: N windows, B of them together, T tokens, M
hidden size, D head_dim.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convert.sample import Sample
from model.attention import Mask
from model.checkpoint import Checkpoint
from model.errors import CheckpointError
from model.llama import Block, Rotation
from model.llama_config import LlamaConfig, read_llama_config
from model.loading import load_block, load_embedding
from model.masks import text_mask
from model.rope import rotations
from model.staging import sync_file, sync_folder

_BATCH_TOKENS = 4096

States = NDArray[np.float32]

Progress = Callable[[int], None]
"""Called with the number of tokens that have just passed a layer."""


class Text:
    """What is the same in all layers: geometry, rotary angles, masks."""

    def __init__(self, config: LlamaConfig, sample: Sample) -> None:
        self.config, self.n_windows, self.length = config, sample.n_windows, sample.window
        positions_1T = torch.arange(self.length)[None]
        self.rotation: Rotation = rotations(config.rope, positions_1T, self.length, torch.float32)
        self._batch = max(1, _BATCH_TOKENS // self.length)

    def mask(self, index: int, n_rows: int) -> Mask:
        return text_mask(n_rows, 0, self.length, self.config.windows[index], None, torch.device("cpu"))

    def batches(self) -> Iterator[slice]:
        for start in range(0, self.n_windows, self._batch):
            yield slice(start, min(start + self._batch, self.n_windows))


@dataclass(frozen=True)
class Layer:
    """One layer and what goes into it."""

    text: Text
    index: int
    block: Block
    states_NTM: States

    def inputs(self) -> Iterator[Tensor]:
        """Yield what the layer's attention reads, a batch of windows at a time, [B, T, M]."""
        for rows in self.text.batches():
            yield self.block.input_layernorm(torch.from_numpy(self.states_NTM[rows].copy()))


def walk(checkpoint: Checkpoint, sample: Sample, folder: Path, progress: Progress) -> Iterator[Layer]:
    """Yield layer after layer; between them the text goes through the one yielded last, as its block then is.

    The states after the last layer stay in the folder (`last_states`).
    """
    config = read_llama_config(checkpoint.config)
    text = Text(config, sample)
    with torch.inference_mode():
        first = _begin(checkpoint, sample, folder)
        progress(first * sample.n_tokens)
        for index in range(first, config.n_layers):
            states_NTM = np.load(_states(folder, index), mmap_mode="r")
            layer = Layer(text, index, load_block(checkpoint, config, index), states_NTM)
            yield layer
            _advance(layer, folder, progress)
            _states(folder, index).unlink()


def check_can_walk(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where the project's own code cannot run the model."""
    try:
        read_llama_config(checkpoint.config)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Merge by the weights alone: --calibration none.") from error


def last_states(checkpoint: Checkpoint, folder: Path) -> Path:
    """Return the file of what the last layer gave."""
    return _states(folder, read_llama_config(checkpoint.config).n_layers)


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
    if sample.ids_NT.max() >= len(embedding_VM):
        raise CheckpointError(
            f"tokenizer.json gives the id {sample.ids_NT.max()}, but the model has {len(embedding_VM)} tokens; they do "
            "not belong together."
        )
    shape = (sample.n_windows, sample.window, embedding_VM.shape[1])
    with _Writer(_states(folder, 0), shape) as states_NTM:
        for n, ids_T in enumerate(sample.ids_NT):
            states_NTM[n] = embedding_VM[torch.from_numpy(ids_T)].float().numpy()
    return 0


def _advance(layer: Layer, folder: Path, progress: Progress) -> None:
    """Write what the layer makes of its states."""
    text, index = layer.text, layer.index
    with _Writer(_states(folder, index + 1), layer.states_NTM.shape) as next_NTM:
        for rows in text.batches():
            x_BTM = torch.from_numpy(layer.states_NTM[rows].copy())
            next_BTM = layer.block(x_BTM, text.rotation, text.mask(index, len(x_BTM)))
            if not next_BTM.isfinite().all():
                raise CheckpointError(
                    f"layer {index} makes NaN or infinite values of a text; the checkpoint is damaged."
                )
            next_NTM[rows] = next_BTM.numpy()
            progress(x_BTM.shape[0] * x_BTM.shape[1])


class _Writer:
    """An array on the disk that takes its name when it is complete."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self._path, self._partial, self._shape = path, path.with_suffix(".partial"), shape

    def __enter__(self) -> States:
        self._array = np.lib.format.open_memmap(self._partial, mode="w+", dtype=np.float32, shape=self._shape)
        with self._partial.open("rb+") as file:  # a full disk is an error here, and a dead process in a mapped file
            os.posix_fallocate(file.fileno(), 0, self._array.offset + self._array.nbytes)
        return self._array

    def __exit__(self, kind: object, *rest: object) -> None:
        del self._array
        if kind is None:
            sync_file(self._partial)
            self._partial.rename(self._path)
            sync_folder(self._path.parent)
