"""Run a text through a model with one layer in memory at a time.

The states between layers are files, so that memory grows neither with the text nor with the model's depth:

    FOLDER/states-0012.npy      the inputs of layer 12, float32 [windows, tokens, hidden]
    FOLDER/attended.npy         the output of its attention
    FOLDER/following.npy        its output, the inputs of layer 13 once layer 12 is merged

A killed run resumes at the layer whose states are in FOLDER. Letters: N windows, B windows in a batch, T tokens, M
hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from convert.calibration_text.choices import VALIDATION_EVERY
from convert.calibration_text.text import CalibrationText
from convert.errors import NO_TORCH, UnsupportedMethodError
from convert.layer_tensors.layer_file import STATES
from convert.layers.native_layers import NativeModelLayers
from convert.layers.runnable_layer import HeadObserver, ModelLayers, RunnableLayer
from model.checkpoint import Checkpoint
from model.common.console import Advance
from model.common.errors import CheckpointError, InvalidValueError
from model.decoder.config import is_native
from model.families import find_family
from model.files.write import sync_file, sync_folder

_BATCH_TOKENS = 1024
"""Tokens per batch. Larger batches do not fit in a processor's cache."""

_CHECKED_LENGTH = 8
"""Tokens of the text on which a model is tried."""

States = NDArray[np.float32]


def is_validation_window(index: int) -> bool:
    """Return whether the window of this index is for validation: every fourth one."""
    return index % VALIDATION_EVERY == VALIDATION_EVERY - 1


def validation_text(text: CalibrationText) -> CalibrationText:
    """Return the validation windows of a text as a text of their own."""
    assert text.ids_NT is not None
    ids_NT = text.ids_NT[[index for index in range(text.n_windows) if is_validation_window(index)]]
    return replace(text, n_windows=len(ids_NT), ids_NT=ids_NT)


class CalibrationWindows:
    """The windows of a text, in batches.

    Every fourth is for validation: refit and refine do not train on it, and solutions are compared on it. The moments,
    of which solutions are computed, include it.
    """

    def __init__(self, text: CalibrationText) -> None:
        self.n_windows, self.window_tokens = text.n_windows, text.window_tokens
        self._batch = max(1, _BATCH_TOKENS // self.window_tokens)

    @property
    def validation_windows(self) -> list[int]:
        return [index for index in range(self.n_windows) if is_validation_window(index)]

    @property
    def training_windows(self) -> list[int]:
        return [index for index in range(self.n_windows) if not is_validation_window(index)]

    def batches(self, windows: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Yield the indices of all windows, or of `windows`, batch by batch."""
        indices = list(range(self.n_windows) if windows is None else windows)
        for start in range(0, len(indices), self._batch):
            yield indices[start : start + self._batch]


@dataclass
class CalibrationLayer:
    """One layer of a model, and its input states on the calibration text."""

    windows: CalibrationWindows
    runnable: RunnableLayer
    states_NTM: States
    folder: Path
    advance: Advance

    @property
    def index(self) -> int:
        return self.runnable.index

    def inputs(self, windows: list[int]) -> Tensor:
        """Return the inputs of the layer's attention, [B, T, M]."""
        return self.runnable.inputs(self.on_device(self.states_NTM[windows]))

    def on_device(self, states_BTM: States) -> Tensor:
        """Return states that were read from a file, on the layer's device."""
        return torch.from_numpy(states_BTM).to(self.runnable.device)

    def run(self, observer: HeadObserver) -> None:
        """Run the layer on the text, with its current weights. Calls `observer` with each batch's heads."""
        shape = self.states_NTM.shape
        with _writing(self._attended, shape) as write_attended, _writing(_following(self.folder), shape) as write_next:
            for windows in self.windows.batches():
                attended_BTM, next_BTM = self.runnable.run(self.on_device(self.states_NTM[windows]), observer)
                write_attended(attended_BTM)
                write_next(next_BTM)
                self.advance(len(windows) * self.windows.window_tokens)

    @property
    def attended_NTM(self) -> States:
        """The attention's output, with the output projection's bias. Call `run` first."""
        attended_NTM: States = np.load(self._attended, mmap_mode="r", allow_pickle=False)
        return attended_NTM

    @property
    def _attended(self) -> Path:
        return self.folder / "attended.npy"

    def finish(self) -> None:
        """Make the layer's output states the next layer's inputs, and remove its own. Free the layer's weights."""
        _make_inputs(self.folder, self.index + 1)
        self._attended.unlink()
        _states(self.folder, self.index).unlink()
        del self.runnable  # else whoever holds this object would hold them while the next layer is loaded


def open_layers(checkpoint: Checkpoint, length: int, device: str) -> ModelLayers:
    """Return the layers of a model on a device, for texts in windows of `length` tokens. `device`: as in `find_device`.

    Raises CheckpointError if neither the project's own decoder nor transformers can run the model, and InputError if
    the device is not available.
    """
    if is_native(checkpoint.config):
        return NativeModelLayers(checkpoint, length, device)
    if any(find_spec(package) is None for package in ("transformers", "accelerate")):
        raise UnsupportedMethodError(NO_TORCH)
    from convert.layers.t5_layers import T5ModelLayers  # transformers takes seconds to import
    from convert.layers.transformers_model_layers import TransformersModelLayers

    is_encoder_decoder = find_family(checkpoint.config).family.is_encoder_decoder
    return (T5ModelLayers if is_encoder_decoder else TransformersModelLayers)(checkpoint, length, device)


def iter_layers(
    checkpoint: Checkpoint,
    text: CalibrationText,
    folder: Path,
    advance: Advance,
    device: str,
    more_tokens: int = 0,
) -> Iterator[CalibrationLayer]:
    """Yield each layer, on the device. Call `run` on each before taking the next: it computes the next layer's input.

    `more_tokens`: tokens that the caller adds to `advance` for each layer. Those of layers that an earlier run finished
    are added here.

    Use it without gradients. The states after the last layer stay in the folder (`last_states`).
    """
    windows, layers = CalibrationWindows(text), open_layers(checkpoint, text.window_tokens, device)
    first = _begin(layers, text, windows, folder)
    advance(first * (text.n_tokens + more_tokens))
    for index in range(first, layers.n_layers):
        states_NTM = np.load(_states(folder, index), mmap_mode="r", allow_pickle=False)
        layer = CalibrationLayer(windows, layers.load(index), states_NTM, folder, advance)
        yield layer
        layer.finish()


def open_checked(checkpoint: Checkpoint, device: str) -> ModelLayers:
    """Return the layers of a model on a device, for short texts.

    Raises UnsupportedMethodError if no code can run them, InvalidValueError for a wrong value in config.json, and
    InputError if the device is not available.
    """
    try:
        layers = open_layers(checkpoint, _CHECKED_LENGTH, device)
        layers.check()
    except InvalidValueError:  # to be corrected; another method would copy it into the output
        raise
    except CheckpointError as error:
        raise UnsupportedMethodError(str(error)) from error
    return layers


def check_tokens(layers: ModelLayers, text: CalibrationText) -> None:
    """Raise CheckpointError if the text has token ids that are no rows of the embedding."""
    n_embeddings = layers.n_embeddings
    ids = [ids_NT for ids_NT in (text.ids_NT, text.read_NT) if ids_NT is not None and ids_NT.size]
    wrong = [number for each in ids for number in (int(each.min()), int(each.max())) if not 0 <= number < n_embeddings]
    if wrong:
        raise CheckpointError(
            f"the calibration text has the token id {wrong[0]}, but the model has a vocabulary of {n_embeddings:,}; "
            "the tokenizer, or a text of token ids, belongs to another model."
        )


def last_states(folder: Path) -> Path:
    """Return the file of the last layer's output states. Call after `iter_layers`."""
    (last,) = folder.glob(STATES)
    return last


def _states(folder: Path, index: int) -> Path:
    return folder / f"states-{index:04}.npy"


def _begin(layers: ModelLayers, text: CalibrationText, windows: CalibrationWindows, folder: Path) -> int:
    """Return the layer to resume at; write the embeddings on a fresh start."""
    states = sorted(folder.glob(STATES))
    for old in states[:-1]:
        old.unlink()
    if states:
        return int(states[-1].stem.removeprefix("states-"))
    assert text.ids_NT is not None
    batches = (layers.embed(torch.from_numpy(text.ids_NT[batch])) for batch in windows.batches())
    first_BTM = next(batches)
    with _writing(_following(folder), (text.n_windows, text.window_tokens, first_BTM.shape[2])) as write:
        write(first_BTM)
        for states_BTM in batches:
            write(states_BTM)
    _make_inputs(folder, 0)
    return 0


def _following(folder: Path) -> Path:
    return folder / "following.npy"


def _make_inputs(folder: Path, index: int) -> None:
    """Make the states in `following.npy` the inputs of layer `index`. They are on the disk before they get the name."""
    sync_file(_following(folder))
    _following(folder).rename(_states(folder, index))
    sync_folder(folder)


@contextmanager
def _writing(path: Path, shape: tuple[int, ...]) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that appends windows to an array file. The file gets its name when it is complete."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})

        def write(windows_BTM: Tensor) -> None:
            file.write(windows_BTM.float().contiguous().cpu().numpy().data)

        yield write
    partial.rename(path)
