"""Run the layers of any family by the model's own class in transformers, one layer in memory at a time.

The model is built without memory for its weights. Calling its decoder with layers that only record gives the arguments
that each layer receives: masks, rotary embeddings, whatever the class passes. Then each layer is loaded and run alone.
The letters are those of `runnable_layer`.
"""

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from convert.calibration_text.read import MAX_WINDOW_TOKENS
from convert.layers.clipped_heads import ClippedHeads
from convert.layers.observed_layer import StopForwardError, embedding_rows, refusing_to_run
from convert.layers.runnable_layer import ModelLayers
from convert.layers.transformers_layer import Arguments, TransformersLayer, recording
from model.checkpoint import Checkpoint
from model.common.errors import CheckpointError
from model.decoder.devices import find_device
from model.decoder.loading import check_readable, matrix_dtypes, read_tensor
from model.decoder.transformers_classes import build_observable_model, load_state
from model.families import Family, find_family
from model.geometry import check_class_settings, read_geometry
from model.language_model import ties_lm_head


class TransformersModelLayers(ModelLayers):
    """The layers of a model, run by its class. Raises CheckpointError for one that cannot be run so."""

    def __init__(self, checkpoint: Checkpoint, length: int, device: str = "cpu") -> None:
        self.checkpoint, self._length, self.device = checkpoint, length, find_device(device)
        self._geometry = read_geometry(checkpoint)
        match = find_family(checkpoint.config)
        family, self._config = match.family, match.config
        check_class_settings(match.config, family, lm_head=False)
        self._model: Any = build_observable_model(
            family.model_type, _for_short_texts(match.config, family), str(checkpoint.path)
        )
        self._decoder = self._model.base_model
        self._layers: nn.ModuleList = getattr(self._decoder, family.names.layers)
        _move_buffers(self._decoder, self.device)
        stem = self._geometry.attention.layer_prefixes[0]
        self._prefix = stem.removesuffix(f"{family.names.layers}.0.")
        """The beginning of the decoder's tensor names in the checkpoint."""
        self._model_prefix = next(f"{n}." for n, module in self._model.named_modules() if module is self._decoder)
        """The beginning of the decoder's parameter names in the model."""
        self._calls: dict[int, list[Arguments]] = {}
        self.n_layers = self._geometry.n_layers
        self._embedding = self._decoder.get_input_embeddings()
        self._embedding.padding_idx = None  # it would not be a row of the smaller embeddings of `_record`
        name = next(n for n, module in self._decoder.named_modules() if module is self._embedding)
        self.embedding_name = f"{self._prefix}{name}.weight"
        own = self._model.state_dict()
        buffers = tuple(f".{part}" for part in family.names.headless_parts)  # of old checkpoints
        names = (name for name in checkpoint.tensors if name.startswith(self._prefix))
        self._parameters = [name for name in names if self._parameter_name(name) in own or not name.endswith(buffers)]
        """The decoder's tensors in the checkpoint."""
        for name in self._parameters:
            expected = own.get(self._parameter_name(name))
            check_readable(checkpoint, name, scalar=expected is not None and not expected.shape)

    def _parameter_name(self, name: str) -> str:
        """Return the model's name of a tensor of the checkpoint."""
        return self._model_prefix + name.removeprefix(self._prefix)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return self._record(ids_BT)[0]

    def load(self, index: int) -> "TransformersLayer":
        if index:
            self._layers[index - 1].to_empty(device="meta")
        stem = f"{self._geometry.family.names.layers}.{index}."
        state = {
            self._parameter_name(name): read_tensor(self.checkpoint, name, torch.float32, scalar=True)
            for name in self._parameters
            if name.startswith(self._prefix + stem)
        }
        load_state(self._model, state, self._model_prefix + stem, str(self.checkpoint.path))
        self._layers[index].to(self.device)
        with refusing_to_run(self.checkpoint), torch.no_grad():
            return TransformersLayer(
                self._layers[index], index, self._geometry, self._length, lambda n_rows: self._arguments(n_rows)[index]
            )

    def load_whole(self) -> Any:
        """Return the model of the class, on the device, in the widest dtype of its matrices. The layers are part of it.

        Raises CheckpointError if a tensor is missing, left over or of the wrong shape.
        """
        check_class_settings(self._config, self._geometry.family, lm_head=True)
        lm_head_names = self._lm_head_names()
        names = {self._parameter_name(name): name for name in self._parameters} | lm_head_names
        dtype = functools.reduce(torch.promote_types, matrix_dtypes(self.checkpoint, names.values()))
        state = {own: read_tensor(self.checkpoint, name, dtype, scalar=True) for own, name in names.items()}
        load_state(self._model, state, "" if lm_head_names else self._model_prefix, str(self.checkpoint.path), dtype)
        if not lm_head_names:
            self._model.get_output_embeddings().weight = self._embedding.weight
        return self._model.to(self.device)

    def _lm_head_names(self) -> dict[str, str]:
        """Return a table of the LM head's tensors: name for the class → name in the checkpoint. Empty if it is tied."""
        others = [name for name in self.checkpoint.tensors if not name.startswith(self._prefix)]
        if self._model.config.model_type == self.checkpoint.config.get("model_type"):
            return {} if self._model.config.tie_word_embeddings else {name: name for name in others}
        own = [name for name in self._model.state_dict() if not name.startswith(self._model_prefix)]
        stored = {name: other for name in own for other in others if f".{other}".endswith(f".{name}")}
        tied = ties_lm_head(self.checkpoint.config, self._config, has_lm_head=bool(stored))
        if tied is None:
            tied = not stored
        if not tied and len(stored) < len(own):
            raise CheckpointError(f"{self.checkpoint.path} lacks the tensor {own[0]}.")
        return {} if tied else stored

    def check(self) -> None:
        n_embeddings = self.n_embeddings  # raises CheckpointError if the embedding is missing
        layer = self.load(0)
        if layer.clip is not None:  # its effect in the other layers is known once they run a text
            generator = torch.Generator().manual_seed(0)
            ids_1T = torch.randint(n_embeddings, (1, self._length), generator=generator, device="cpu")
            heads = ClippedHeads(layer.clip)
            with torch.no_grad():
                heads.add(layer.unclipped_heads(None, layer.inputs(self.embed(ids_1T))))
            heads.check(0, "on random tokens")

    def _arguments(self, n_rows: int) -> list[Arguments]:
        """Return the arguments that each layer receives for a batch of `n_rows` windows."""
        if n_rows not in self._calls:
            self._calls[n_rows] = self._record(torch.zeros(n_rows, self._length, dtype=torch.long, device="cpu"))[1]
        return self._calls[n_rows]

    def _record(self, ids_BT: Tensor) -> tuple[Tensor, list[Arguments]]:
        """Return the input states of the first layer and the arguments of each layer, for a batch of token ids."""
        weight_VM, row_BT = embedding_rows(self.checkpoint, self.embedding_name, ids_BT)
        self._embedding.weight = nn.Parameter(weight_VM.to(self.device), requires_grad=False)  # of this text only
        received: list[tuple[Tensor, Arguments]] = []
        watched = recording(list(self._layers), received)
        with refusing_to_run(self.checkpoint), watched, torch.no_grad(), suppress(StopForwardError):
            self._decoder(row_BT.to(self.device), use_cache=False)
        return received[0][0], [call for _, call in received]


def _for_short_texts(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return a config whose class makes no tables for texts longer than a window."""
    key = family.positions.alibi_table_length
    longest = None if key is None else config.get(key)
    if key is None or not isinstance(longest, int):
        return config
    return {**config, key: min(longest, MAX_WINDOW_TOKENS)}


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to a device. Its parameters have no memory, and cannot be moved."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, buffer.to(device), persistent=name not in part._non_persistent_buffers_set)
