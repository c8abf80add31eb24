"""Run a text through a model with one layer in memory at a time.

The states between layers are files, so that memory grows neither with the text nor with the model's depth:

    FOLDER/states-0012.npy      the inputs of layer 12, float32 [windows, tokens, hidden]
    FOLDER/attended.npy         the output of its attention

A killed run resumes at the layer whose states are in FOLDER. Letters: N windows, B windows in a batch, T tokens, M
hidden size, H query heads, G key/value heads, D head_dim.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convert.calibration.text import CalibrationText
from convert.planning.recipe import UnsupportedMethodError
from model.checkpoint import Checkpoint
from model.common.errors import CheckpointError
from model.common.files import sync_file, sync_folder
from model.decoder.attention import Mask, attend
from model.decoder.config import LlamaConfig, read_llama_config
from model.decoder.llama import Block, Rotation
from model.decoder.loading import check_runnable, embedding_name, load_block, load_embedding
from model.decoder.masks import text_mask
from model.decoder.rope import rotate, rotations

_BATCH_TOKENS = 1024
"""Tokens per batch. Larger batches do not fit in a processor's cache."""

States = NDArray[np.float32]

Progress = Callable[[int], None]
"""Called with the number of tokens that a layer has just processed."""


@dataclass(frozen=True)
class Heads:
    """A batch of a layer's heads, before and after rotation."""

    q_BTHD: Tensor
    rotated_q_BTHD: Tensor
    rotated_k_BTGD: Tensor
    v_BTGD: Tensor


Watch = Callable[[Heads], None]


class CalibrationWindows:
    """The parts that all layers share: model config, rotary angles, masks, batches of windows."""

    def __init__(self, config: LlamaConfig, text: CalibrationText) -> None:
        self.config, self.n_windows, self.length = config, text.n_windows, text.window
        positions_1T = torch.arange(self.length)[None]
        self.rotation: Rotation = rotations(config.rope, positions_1T, torch.tensor([[self.length]]), torch.float32)
        self._batch = max(1, _BATCH_TOKENS // self.length)

    def mask(self, index: int, n_rows: int) -> Mask:
        """Return the attention mask of layer `index` for a batch of `n_rows` windows."""
        return text_mask(n_rows, 0, self.length, self.config.windows[index], None, torch.device("cpu"))

    def batches(self, windows: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Yield the indices of all windows, or of `windows`, batch by batch."""
        indices = list(range(self.n_windows) if windows is None else windows)
        for start in range(0, len(indices), self._batch):
            yield indices[start : start + self._batch]


@dataclass
class Layer:
    """One layer and its input states."""

    text: CalibrationWindows
    index: int
    block: Block
    states_NTM: States
    folder: Path

    def inputs(self, windows: list[int]) -> Tensor:
        """Return the normalised inputs of the layer's attention, [B, T, M]."""
        x_BTM: Tensor = self.block.input_layernorm(torch.from_numpy(self.states_NTM[windows]))
        return x_BTM

    def attend(self, watch: Watch) -> None:
        """Run the layer's attention on the text, with its current weights. Calls `watch` with each batch's heads."""
        attention, rotation = self.block.self_attn, self.text.rotation
        with _writing(self._attended, self.states_NTM.shape, durable=False) as write:
            for windows in self.text.batches():
                x_BTM = self.inputs(windows)
                q_BTHD, k_BTGD, v_BTGD = (
                    projection(x_BTM).view(*x_BTM.shape[:2], -1, attention.head_dim)
                    for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
                )
                for numbers in (q_BTHD, k_BTGD, v_BTGD):
                    self._check(numbers)
                heads = Heads(q_BTHD, rotate(q_BTHD, *rotation), rotate(k_BTGD, *rotation), v_BTGD)
                watch(heads)
                mask = self.text.mask(self.index, len(windows))
                out_BTHD = attend(heads.rotated_q_BTHD, heads.rotated_k_BTGD, v_BTGD, mask)
                write(attention.o_proj(out_BTHD.flatten(2)))

    @property
    def attended_NTM(self) -> States:
        """The attention's output, with the output projection's bias."""
        attended_NTM: States = np.load(self._attended, mmap_mode="r", allow_pickle=False)
        return attended_NTM

    @property
    def _attended(self) -> Path:
        return self.folder / "attended.npy"

    def run_mlp(self, progress: Progress) -> None:
        """Write the layer's output states, the next layer's inputs, and remove its input states."""
        block, attended_NTM = self.block, self.attended_NTM
        with _writing(_states(self.folder, self.index + 1), self.states_NTM.shape) as write:
            for windows in self.text.batches():
                x_BTM = torch.from_numpy(self.states_NTM[windows]).add_(torch.from_numpy(attended_NTM[windows]))
                next_BTM = block.mlp(block.post_attention_layernorm(x_BTM)).add_(x_BTM)
                self._check(next_BTM)
                write(next_BTM)
                progress(x_BTM.shape[0] * x_BTM.shape[1])
        self._attended.unlink()
        _states(self.folder, self.index).unlink()

    def _check(self, numbers: Tensor) -> None:
        if not numbers.isfinite().all():
            raise CheckpointError(
                f"layer {self.index} makes NaN or infinite values of a text; the checkpoint is damaged."
            )


def iter_layers(
    checkpoint: Checkpoint, text: CalibrationText, folder: Path, progress: Progress, more_tokens: int = 0
) -> Iterator[Layer]:
    """Yield each layer. The caller runs `attend`, then `iter_layers` runs the MLP.

    `more_tokens`: tokens of a layer that the caller reports to `progress` itself; those of finished layers count too.

    Use it without gradients. The states after the last layer stay in the folder (`last_states`).
    """
    config = read_llama_config(checkpoint.config)
    windows = CalibrationWindows(config, text)
    first = _begin(checkpoint, text, folder)
    progress(first * (text.n_tokens + more_tokens))
    for index in range(first, config.n_layers):
        states_NTM = np.load(_states(folder, index), mmap_mode="r", allow_pickle=False)
        layer = Layer(windows, index, load_block(checkpoint, config, index), states_NTM, folder)
        yield layer
        layer.run_mlp(progress)


def check_can_walk(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedMethodError if the project's own decoder cannot run the model."""
    try:
        read_llama_config(checkpoint.config)
        check_runnable(checkpoint)
    except CheckpointError as error:
        raise UnsupportedMethodError(str(error)) from error


def check_tokens(checkpoint: Checkpoint, text: CalibrationText) -> None:
    """Raise CheckpointError if the text has token ids that are no rows of the embedding."""
    embedding = checkpoint.tensors.get(embedding_name(checkpoint))
    if embedding is None:
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {embedding_name(checkpoint)}.")
    ids = [ids_NT for ids_NT in (text.ids_NT, text.read_NT) if ids_NT is not None and ids_NT.size]
    wrong = [
        number for each in ids for number in (int(each.min()), int(each.max())) if not 0 <= number < embedding.shape[0]
    ]
    if wrong:
        raise CheckpointError(
            f"the calibration text has the token id {wrong[0]}, but the model has {embedding.shape[0]} tokens; "
            "tokenizer.json, or a text of token ids, belongs to another model."
        )


def last_states(checkpoint: Checkpoint, folder: Path) -> Path:
    """Return the file of the last layer's output states."""
    return _states(folder, read_llama_config(checkpoint.config).n_layers)


def _states(folder: Path, index: int) -> Path:
    return folder / f"states-{index:04}.npy"


def _begin(checkpoint: Checkpoint, text: CalibrationText, folder: Path) -> int:
    """Return the layer to resume at; write the embeddings on a fresh start."""
    states = sorted(folder.glob("states-*.npy"))
    for old in states[:-1]:
        old.unlink()
    if states:
        return int(states[-1].stem.removeprefix("states-"))
    embedding_VM = load_embedding(checkpoint)
    assert text.ids_NT is not None
    shape = (text.n_windows, text.window, embedding_VM.shape[1])
    with _writing(_states(folder, 0), shape) as write:
        for ids_T in text.ids_NT:
            write(embedding_VM[torch.from_numpy(ids_T)])
    return 0


@contextmanager
def _writing(path: Path, shape: tuple[int, ...], durable: bool = True) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that appends windows to an array file. The file gets its name when it is complete."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})

        def write(windows_BTM: Tensor) -> None:
            file.write(windows_BTM.float().contiguous().numpy().data)

        yield write
    if durable:
        sync_file(partial)
    partial.rename(path)
    if durable:
        sync_folder(path.parent)
