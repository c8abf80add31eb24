"""Run T5's decoder by its class in transformers, one layer in memory at a time.

A window of text is halved: the encoder reads its first half, the decoder its second half, after the token that begins
a decoder's text. The states [B, T, M] of a window are the encoder's output, then the decoder's states. Each layer of
the decoder counts as two here: its self-attention, and its cross-attention with the feed-forward network. Attention has
no output at the encoder's positions; zeros are there. The letters are those of `runnable_layer`, and E the encoder's
positions, A those of the decoder.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from convert.layers.observed_layer import (
    ObservedLayer,
    embedding_rows,
    recorded_inputs,
    recorded_outputs,
    refusing_to_run,
)
from convert.layers.runnable_layer import HeadObserver, HeadStates, HeadWeights, ModelLayers
from model.checkpoint import Checkpoint
from model.common import checks
from model.common.errors import CheckpointError
from model.decoder.devices import find_device
from model.decoder.loading import check_readable, read_tensor
from model.decoder.observed_attention import ObservedCall
from model.decoder.transformers_classes import build_observable_model, load_state
from model.families import find_family
from model.geometry import Geometry, read_geometry


class T5ModelLayers(ModelLayers):
    """The decoder of a T5, run by its class. Raises CheckpointError for one that cannot be run so."""

    embedding_name = "shared.weight"

    def __init__(self, checkpoint: Checkpoint, length: int, device: str = "cpu") -> None:
        self.device = find_device(device)
        self.checkpoint, self._n_encoded, self._n_decoded = checkpoint, length // 2, length - length // 2
        self._geometry = read_geometry(checkpoint)
        match = find_family(checkpoint.config)
        self._model: Any = build_observable_model(match.family.model_type, match.config, str(checkpoint.path))
        start = getattr(self._model.config, "decoder_start_token_id", None)
        if not checks.is_whole_number(start, least=0):
            raise CheckpointError(
                f"config.json has decoder_start_token_id = {checks.short_repr(start)}; it must be the number of the "
                "token that begins a text of the decoder."
            )
        self._start: int = start
        self.n_layers = 2 * self._geometry.n_layers
        for name in checkpoint.tensors:
            check_readable(checkpoint, name)

    def _load(self, prefix: str) -> Any:
        """Return a module of the model with its weights, by the beginning of its tensors' names."""
        unused = ("embed_tokens.weight", *(self._model._keys_to_ignore_on_load_unexpected or ()))
        names = [n for n in self.checkpoint.tensors if n.startswith(prefix) and not n.endswith(unused)]
        state = {name: read_tensor(self.checkpoint, name, torch.float32) for name in names}
        load_state(self._model, state, prefix, str(self.checkpoint.path))
        return self._model.get_submodule(prefix.removesuffix(".")).to(self.device)

    @cached_property
    def _encoder(self) -> Any:
        """The encoder with its weights, all of them in memory."""
        self._model.encoder.embed_tokens = None  # it gets states
        return self._load("encoder.")

    @cached_property
    def _added_1HAA(self) -> Tensor:
        """The sum of the mask and the first layer's bias, which all self-attention adds to its logits."""
        attention = self._load("decoder.block.0.layer.0.").SelfAttention
        zeros_1AM = attention.q.weight.new_zeros(1, self._n_decoded, self._geometry.hidden_size)
        bias_1HAA: Tensor = attention(zeros_1AM)[1]
        mask_AA = torch.full_like(bias_1HAA[0, 0], torch.finfo(torch.float32).min).triu(1)
        return bias_1HAA + mask_AA

    def embed(self, ids_BT: Tensor) -> Tensor:
        encoded_BE, decoded_BA = ids_BT.tensor_split([self._n_encoded], dim=1)
        decoded_BA = F.pad(decoded_BA[:, :-1], (1, 0), value=self._start)
        ids_BT = torch.cat([encoded_BE, decoded_BA], dim=1)
        rows_VM, row_BT = embedding_rows(self.checkpoint, self.embedding_name, ids_BT)
        states_BTM = rows_VM[row_BT].to(self.device)
        with refusing_to_run(self.checkpoint), torch.no_grad():
            encoded_BEM = self._encoder(inputs_embeds=states_BTM[:, : self._n_encoded]).last_hidden_state
        return torch.cat([encoded_BEM, states_BTM[:, self._n_encoded :]], dim=1)

    def load(self, index: int) -> "T5Sublayer":
        self.__dict__.pop("_encoder", None)  # its memory is the layers' now
        with refusing_to_run(self.checkpoint), torch.no_grad():
            added_1HAA = self._added_1HAA
            self._model.to_empty(device="meta")
            stem = f"decoder.block.{index // 2}.layer."
            if index % 2 == 0:
                sublayer = self._load(f"{stem}0.")
                return T5Sublayer(index, self._geometry, self._n_encoded, sublayer, sublayer.SelfAttention, added_1HAA)
            sublayer, feed_forward = self._load(f"{stem}1."), self._load(f"{stem}2.")
            attention = sublayer.EncDecAttention
            return T5Sublayer(index, self._geometry, self._n_encoded, sublayer, attention, None, feed_forward)

    def check(self) -> None:
        if not 0 <= self._start < self.n_embeddings:
            raise CheckpointError(
                f"config.json has decoder_start_token_id = {self._start}, but the model has a vocabulary of "
                f"{self.n_embeddings:,}."
            )
        states_1TM = torch.zeros(1, self._n_encoded + self._n_decoded, self._geometry.hidden_size).to(self.device)
        for index in range(2):
            with torch.no_grad():
                self.load(index).run(states_1TM, lambda heads: None)


class T5Sublayer(ObservedLayer):
    """Self-attention or, with a feed-forward network, cross-attention of a layer of the decoder."""

    rotation = None
    output_bias = None

    def __init__(
        self,
        index: int,
        geometry: Geometry,
        n_encoded: int,
        sublayer: Any,
        attention: Any,
        added_1HAA: Tensor | None,
        feed_forward: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.index, self._n_encoded, self._model_type = index, n_encoded, geometry.family.model_type
        self.n_heads, self.n_kv_heads, self.head_dim = geometry.n_heads, geometry.n_kv_heads, geometry.head_dim
        self._sublayer, self._attention, self._feed_forward = sublayer, attention, feed_forward
        self._added_1HAA, self.device = added_1HAA, attention.o.weight.device

    def _arguments(self, encoded_BEM: Tensor) -> dict[str, Any]:
        """Return the arguments of the attention, but for the states."""
        if self._feed_forward is None:
            return {"position_bias": self._added_1HAA}
        return {"key_value_states": encoded_BEM}

    def inputs(self, states_BTM: Tensor) -> Tensor:
        encoded_BEM, states_BAM = states_BTM.tensor_split([self._n_encoded], dim=1)
        return torch.cat([encoded_BEM, self._sublayer.layer_norm(states_BAM)], dim=1)

    def run(self, states_BTM: Tensor, observer: HeadObserver) -> tuple[Tensor, Tensor]:
        def observe(call: ObservedCall) -> None:
            q_BAHD, k_BSKD, v_BSKD = (heads.transpose(1, 2) for heads in (call.q, call.k, call.v))
            self.check_finite(q_BAHD, k_BSKD, v_BSKD)
            observer(HeadStates(q_BAHD, q_BAHD, k_BSKD, v_BSKD))

        encoded_BEM, states_BAM = states_BTM.tensor_split([self._n_encoded], dim=1)
        with recorded_outputs(self._attention.o) as attended, self._observing(observe):
            next_BAM = self._sublayer(states_BAM, **self._arguments(encoded_BEM))[0]
        if self._feed_forward is not None:
            next_BAM = self._feed_forward(next_BAM)
        self.check_finite(next_BAM)
        return self._after_encoder(attended[0]), torch.cat([encoded_BEM, next_BAM], dim=1)

    def heads_out(self, weights: HeadWeights, x_BTM: Tensor) -> Tensor:
        parameters = {
            "q.weight": weights.q_CX,
            "k.weight": self._repeated(weights.k_CX),
            "v.weight": self._repeated(weights.v_CX),
        }
        encoded_BEM, x_BAM = x_BTM.tensor_split([self._n_encoded], dim=1)
        with recorded_inputs(self._attention.o) as mixed:
            functional_call(self._attention, parameters, (x_BAM,), self._arguments(encoded_BEM))
        return self._after_encoder(mixed[0])

    def _after_encoder(self, x_BAM: Tensor) -> Tensor:
        return F.pad(x_BAM, (0, 0, self._n_encoded, 0))
