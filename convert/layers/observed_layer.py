"""Observe the attention of layers that a class of transformers runs: what `transformers_layer` and T5's layers share.

The letters are those of `runnable_layer`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convert.layers.runnable_layer import RunnableLayer
from model.checkpoint import Checkpoint
from model.decoder.observed_attention import ObservedCall, Observer, attention_weights, observe_attention
from model.decoder.transformers_classes import no_attention_function, refusing


def refusing_to_run(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Raise CheckpointError in place of what the class raises while it runs."""
    return refusing(f"transformers cannot run the model of {checkpoint.path}", running=True)


def embedding_rows(checkpoint: Checkpoint, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embedding's rows of these ids, [V, M] in float32, each once, and the row of each id.

    The whole embedding need not fit into memory.
    """
    ids_V, rows = torch.unique(ids, return_inverse=True)
    read = [checkpoint.rows(name, i, i + 1) for i in ids_V.tolist()]
    return torch.from_numpy(np.concatenate(read).astype(np.float32)), rows


class StopForwardError(Exception):
    """Raised to end a forward pass where the rest is not needed."""


@contextmanager
def recorded_inputs(module: nn.Module, stop: bool = False) -> Iterator[list[Tensor]]:
    """Append the first argument of each call of a module to the list. With `stop`, end the forward pass there."""
    inputs: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        if stop:
            raise StopForwardError

    hook = module.register_forward_pre_hook(record)
    try:
        yield inputs
    finally:
        hook.remove()


@contextmanager
def recorded_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Append the output of each call of a module to the list."""
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


class ObservedLayer(RunnableLayer):
    """A layer whose attention module's queries, keys and values are observed. Subclasses set the attributes."""

    _attention: Any
    _model_type: str
    _last_call: ObservedCall | None = None
    """What the attention received last."""

    @contextmanager
    def _observing(self, observer: Observer) -> Iterator[None]:
        """Call `observer` when the attention runs. Raises CheckpointError if it has not run at the end."""
        self._last_call = None

        def observe(call: ObservedCall) -> None:
            self._last_call = call
            observer(call)

        with observe_attention(self._model_type, self._attention, observe):
            yield
        if self._last_call is None:
            raise no_attention_function(self._model_type)

    def attention_weights(self, q_HSD: Tensor, k_KTD: Tensor, at_S: Tensor) -> Tensor:
        assert self._last_call is not None, "call `run` first"
        return attention_weights(self._last_call, q_HSD, k_KTD, at_S)

    def _repeated(self, rows_CX: Tensor) -> Tensor:
        """Return the rows of K/V heads, repeated to the number of heads that the class has."""
        heads_KDX = rows_CX.view(-1, self.head_dim, rows_CX.shape[1])
        return heads_KDX.repeat_interleave(self.n_kv_heads // len(heads_KDX), dim=0).flatten(0, 1)
