"""Run one layer of any family by its class in transformers, and observe its attention.

`model.decoder.observed_attention` sees the rotated queries and keys and the values. Before a layer is used, random
inputs show whether its heads are what Groupwise knows of the family. The letters are those of `runnable_layer`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from convert.layer_tensors.head_matrices import half_split_order
from convert.layers.observed_layer import ObservedLayer, StopForwardError, recorded_inputs, recorded_outputs
from convert.layers.runnable_layer import HeadObserver, HeadStates, HeadWeights
from convert.layers.transformers_norms import TransformersNorms
from model.attention_layout import Kind, projections
from model.common.errors import CheckpointError
from model.decoder.observed_attention import ObservedCall, observe_attention
from model.decoder.transformers_classes import no_attention_function, refusing
from model.geometry import Geometry

_ROTATION_ERROR, _LINEAR_ERROR = 1e-4, 1e-2
"""Maximum relative differences between the class's heads and ours, after and before rotation."""

KINDS: tuple[Kind, ...] = ("q", "k", "v")

Arguments = dict[str, Any]
"""The arguments of a layer, or of its attention, by name, but for the states."""


@contextmanager
def recording(layers: list[nn.Module], received: list[tuple[Tensor, Arguments]]) -> Iterator[None]:
    """Let layers record their states and other arguments instead of running. The last one stops the model."""

    def recorder(forward: Callable[..., Any]) -> Callable[..., Tensor]:
        signature = inspect.signature(forward)

        def record(*args: Any, **kwargs: Any) -> Tensor:
            states_BTM: Tensor
            states_BTM, *others = args if args else (kwargs.pop("hidden_states"),)
            names = [name for name in signature.parameters if name != "hidden_states"]
            received.append((states_BTM, {**dict(zip(names, others, strict=False)), **kwargs}))
            if len(received) == len(layers):
                raise StopForwardError
            return states_BTM

        return record

    for layer in layers:
        layer.forward = recorder(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class TransformersLayer(ObservedLayer):
    """One layer of the class."""

    def __init__(
        self, layer: Any, index: int, geometry: Geometry, length: int, arguments: Callable[[int], Arguments]
    ) -> None:
        assert geometry.n_rotary_pairs is not None
        self.index, self._layer, self._length, self._arguments = index, layer, length, arguments
        self._hidden_size, self._model_type = geometry.hidden_size, geometry.family.model_type
        self.n_heads, self.n_kv_heads, self.head_dim = geometry.n_heads, geometry.n_kv_heads, geometry.head_dim
        family, sizes = geometry.family, geometry.attention.sizes
        self._attention: Any = layer.get_submodule(family.names.attention[0])
        self._output: Any = self._attention.get_submodule(family.names.output)
        self.device, self.output_bias = self._output.weight.device, self._output.bias
        self._rotates_back = family.positions.rotates_back
        self._n_rotated = 2 * geometry.n_rotary_pairs[index]
        order = half_split_order(self.head_dim, self._n_rotated // 2, family.positions.rotary_pairing)
        self._order = torch.from_numpy(order).to(self.device)
        self._heads = {parameter: projections(family, sizes, parameter, "") for parameter in ("weight", "bias")}
        self._norms: TransformersNorms | None = None
        if family.head_norms is not None and family.head_norms.kind == "rms":  # others: see `check_layer_merge`
            self._norms = TransformersNorms(self._attention, family.head_norms, self._order, self._n_rotated // 2)
        # MPT's module has the setting itself, OLMo's reads it from its config. 0 is none for MPT.
        has_setting = hasattr(self._attention, "clip_qkv")
        self._clips: Any = self._attention if has_setting else getattr(self._attention, "config", None)
        self.clip = getattr(self._clips, "clip_qkv", None) or None
        self._calls: dict[int, Arguments] = {}
        mask = self._attention_call(1).get("attention_mask")
        if mask is None or torch.equal(mask[..., 0, -1], mask[..., 0, 0]):  # the first token sees the last, as itself
            raise CheckpointError(
                f"layer {index} has no causal mask (is_causal, use_bidirectional_attention), which calibrating needs."
            )
        self.rotation, self.attention_scaling = self._read_rotation()
        self._check_heads()

    def inputs(self, states_BTM: Tensor) -> Tensor:
        return self._until_attention(states_BTM)[0]

    def run(self, states_BTM: Tensor, observer: HeadObserver) -> tuple[Tensor, Tensor]:
        scales_BTK = (
            None if self._norms is None else self._norms.key_scales(self._projected(self.inputs(states_BTM), "k"))
        )

        def observe(call: ObservedCall) -> None:
            rotated_q_BTHD, rotated_k_BTKD = self._heads_of(call, "q"), self._heads_of(call, "k")
            v_BTKD = call.v.transpose(1, 2)
            self.check_finite(rotated_q_BTHD, rotated_k_BTKD, v_BTKD)
            observer(HeadStates(self.unrotated(rotated_q_BTHD), rotated_q_BTHD, rotated_k_BTKD, v_BTKD, scales_BTK))

        running = refusing(f"transformers cannot run layer {self.index} on a text", running=True)
        with running, recorded_outputs(self._output) as attended, self._observing(observe):
            result = self._layer(states_BTM, **self._arguments(len(states_BTM)))
        next_BTM: Tensor = result[0] if isinstance(result, tuple) else result
        self.check_finite(next_BTM)
        return attended[0], next_BTM

    def heads_out(self, weights: HeadWeights, x_BTM: Tensor) -> Tensor:
        call = self._attention_call(len(x_BTM))
        with recorded_inputs(self._output, stop=True) as mixed, self._unclipped(), suppress(StopForwardError):
            functional_call(self._attention, self._parameters(weights), (), {**call, "hidden_states": x_BTM})
        return mixed[0]

    def unclipped_heads(self, weights: HeadWeights | None, x_BTM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        received: list[ObservedCall] = []

        def observe(call: ObservedCall) -> None:
            received.append(call)
            raise StopForwardError

        arguments = {**_unrotated(self._attention_call(len(x_BTM))), "hidden_states": x_BTM}
        parameters = {} if weights is None else self._parameters(weights)
        observing = observe_attention(self._model_type, self._attention, observe)
        with self._unclipped(), observing, suppress(StopForwardError):
            functional_call(self._attention, parameters, (), arguments)
        (call,) = received
        n_kv_heads = self.n_kv_heads if weights is None else len(weights.k_CX) // self.head_dim
        step = self.n_kv_heads // n_kv_heads  # the class has its number of heads, with copies of shared ones
        k_BTKD, v_BTKD = self._heads_of(call, "k")[:, :, ::step], call.v.transpose(1, 2)[:, :, ::step]
        return self._heads_of(call, "q"), k_BTKD, v_BTKD

    @contextmanager
    def _unclipped(self) -> Iterator[None]:
        """Let the class compute queries, keys and values without its clip."""
        if self.clip is None:
            yield
            return
        self._clips.clip_qkv = None
        try:
            yield
        finally:
            self._clips.clip_qkv = self.clip

    def _parameters(self, weights: HeadWeights) -> dict[str, Tensor]:
        """Return the class's parameters for these weights. Shared K/V heads are repeated to the class's number."""
        n_inputs = self._hidden_size
        rows = [weights.q_CX, self._repeated(weights.k_CX), self._repeated(weights.v_CX)]
        back = torch.argsort(self._order)
        for i in range(2):  # queries and keys; values are not rotated
            rows[i] = rows[i].view(-1, self.head_dim, rows[i].shape[1])[:, back].flatten(0, 1)
        parameters = {} if self._norms is None else self._norms.parameters(weights, self.n_kv_heads)
        for parameter, heads in self._heads.items():
            columns = slice(0, n_inputs) if parameter == "weight" else n_inputs
            if parameter == "bias" and rows[0].shape[1] == n_inputs:
                continue
            for name in dict.fromkeys(each.tensor_names[0] for each in heads):
                sharing = [i for i, each in enumerate(heads) if each.tensor_names[0] == name]
                joined = torch.cat([rows[i] for i in sharing])
                positions = torch.from_numpy(np.concatenate([heads[i].rows for i in sharing])).to(self.device)
                parameters[name] = joined[torch.argsort(positions)][:, columns]
        return parameters

    def _until_attention(self, states_BTM: Tensor) -> tuple[Tensor, Arguments]:
        """Run the layer until it calls its attention; return the attention's input states and other arguments."""
        received: list[tuple[Tensor, Arguments]] = []
        with recording([self._attention], received), suppress(StopForwardError):
            self._layer(states_BTM, **self._arguments(len(states_BTM)))
        return received[0]

    def _attention_call(self, n_rows: int) -> Arguments:
        """Return the attention's arguments, but for the states, for a batch of `n_rows` windows."""
        if n_rows not in self._calls:
            zeros_BTM = torch.zeros(n_rows, self._length, self._hidden_size, device=self.device)
            self._calls[n_rows] = self._until_attention(zeros_BTM)[1]
        return self._calls[n_rows]

    def _heads_of(self, call: ObservedCall, kind: Kind) -> Tensor:
        """Return the queries or keys that the attention function received, in half-split order, [B, T, H, D]."""
        heads_BTHD = getattr(call, kind)[..., self._order].transpose(1, 2)
        return heads_BTHD if self._norms is None else self._norms.with_pair_means(kind, heads_BTHD)

    def _read_rotation(self) -> tuple[tuple[Tensor, Tensor] | None, float]:
        """Return the cosines and sines of the class's rotary embedding, [T, R], and the factor that was in both."""
        if not self._n_rotated:
            return None, 1.0
        n_pairs = self._n_rotated // 2
        cos_TR, sin_TR = (x[0].float() for x in self._attention_call(1)["position_embeddings"])
        if cos_TR.shape[1] == self._n_rotated:  # each pair's angle twice: side by side, or in the two halves
            step = 2 if torch.equal(cos_TR[:, 0::2], cos_TR[:, 1::2]) and n_pairs > 1 else 1
            cos_TR, sin_TR = (x[:, ::step][:, :n_pairs] for x in (cos_TR, sin_TR))
        length_TR = torch.hypot(cos_TR, sin_TR)
        # Norms after rotation take the factor away again.
        is_normalised = self._norms is not None and self._norms.after_rotation
        sign = -1 if self._rotates_back else 1
        rotation = (cos_TR / length_TR).repeat(1, 2), (sign * sin_TR / length_TR).repeat(1, 2)
        return rotation, 1.0 if is_normalised else float(length_TR.mean())

    def _check_heads(self) -> None:
        """Raise CheckpointError unless the class computes queries, keys, values and attention as this module does.

        Tried on random inputs, once with the class's rotary embedding, and once with one that rotates nothing.
        """
        call = self._attention_call(1)
        calls = [call, _unrotated(call)] if "position_embeddings" in call else [call]
        received: list[ObservedCall] = []
        generator = torch.Generator().manual_seed(0)
        x_1TM = torch.randn(1, self._length, self._hidden_size, generator=generator, device="cpu").to(self.device)
        observing = observe_attention(self._model_type, self._attention, received.append)
        with recorded_inputs(self._output) as mixed, self._unclipped(), observing:
            for arguments in calls:
                self._attention(**{**arguments, "hidden_states": x_1TM})
        if len(received) < len(calls):
            raise no_attention_function(self._model_type)
        rotated, plain = received[0], received[-1]
        self._check_attention(rotated, mixed[0])
        self._check_projections(x_1TM, plain)
        self._check_rotation(rotated, plain)

    def _check_attention(self, rotated: ObservedCall, mixed_1TC: Tensor) -> None:
        """Raise CheckpointError unless the class's attention is the softmax that was observed."""
        some = slice(None, None, max(1, self._length // 8))
        if _relative_error(self._mixed(rotated, some), mixed_1TC[:, some]) > _ROTATION_ERROR:
            raise CheckpointError(
                f"layer {self.index}: transformers' class computes attention differently from what Groupwise knows of "
                "this model_type; use --method mean."
            )

    def _check_projections(self, x_1TM: Tensor, plain: ObservedCall) -> None:
        """Raise CheckpointError unless the class's heads are linear in its inputs, up to norms that are known."""
        for kind in KINDS:
            ours = self._projected(x_1TM, kind)
            if self._norms is not None and kind != "v":
                ours = self._norms.apply(kind, ours)
            if _relative_error(ours.transpose(1, 2), getattr(plain, kind)) > _LINEAR_ERROR:
                raise CheckpointError(
                    f"layer {self.index}: transformers' class changes queries, keys or values after their projections "
                    "(norms, or scales that depend on the position) in a way that Groupwise does not know; "
                    "use --method mean."
                )

    def _check_rotation(self, rotated: ObservedCall, plain: ObservedCall) -> None:
        """Raise CheckpointError unless the class rotates queries and keys as `rotation` says."""
        for kind in KINDS[:2]:
            ours, expected = self.unrotated(self._heads_of(rotated, kind)), self._heads_of(plain, kind)
            if _relative_error(ours, expected) > _ROTATION_ERROR:
                raise CheckpointError(
                    f"layer {self.index}: transformers' class rotates queries and keys differently from what Groupwise "
                    "knows of this model_type; use --method mean."
                )

    def _mixed(self, call: ObservedCall, at: slice) -> Tensor:
        """Return the values mixed by the attention that was observed, for some positions, [1, S, C]."""
        k_1HTD, v_1HTD = (x.repeat_interleave(self.n_heads // x.shape[1], dim=1) for x in (call.k, call.v))
        weights_1HST = call.softmax(call.q[:, :, at] @ k_1HTD.mT, call.mask[:1, :, at])
        return (weights_1HST @ v_1HTD).transpose(1, 2).flatten(2)

    def _projected(self, x_BTM: Tensor, kind: Kind) -> Tensor:
        """Return queries, keys or values by the class's projections alone, [B, T, heads, D]."""
        weights, biases = (self._heads[parameter][KINDS.index(kind)] for parameter in ("weight", "bias"))
        name, rows = weights.tensor_names[0], torch.from_numpy(weights.rows).to(self.device)
        module = self._attention.get_submodule(name.removesuffix(".weight"))
        heads_BTC: Tensor = x_BTM @ module.weight[rows].T
        if module.bias is not None:
            heads_BTC = heads_BTC + module.bias[torch.from_numpy(biases.rows).to(self.device)]
        return heads_BTC.view(*heads_BTC.shape[:2], -1, self.head_dim)


def _unrotated(call: Arguments) -> Arguments:
    """Return the arguments of an attention with a rotary embedding that rotates nothing, if they have any."""
    if "position_embeddings" not in call:
        return call
    cos, sin = call["position_embeddings"]
    return {**call, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


def _relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm().clamp(min=1e-30))
