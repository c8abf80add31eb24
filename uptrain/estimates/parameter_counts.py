"""Count a model's parameters by the places where memory needs them: in layers, outside, and in the LM head."""

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

from model.checkpoint import TensorInfo
from model.checkpoint.tensor import is_buffer, layer_number

_N_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_N_USED = ("num_experts_per_tok", "moe_topk")
"""The number of experts in config.json, by family, and how many of them a token uses: of all layers, or of each."""


def count_parameters(tensors: Iterable[TensorInfo]) -> int:
    """Return the number of parameters, without the buffers that old checkpoints store."""
    return sum(prod(tensor.shape) for tensor in tensors if not is_buffer(tensor))


def count_multiplied(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> int:
    """Return the number of parameters that a token is multiplied by: without lookups, and experts that it does not use.

    Of the matrices outside layers, embeddings are looked up, and the largest is the LM head, or the embedding that is
    also the LM head.
    """
    parameters = without_buffers(tensors)
    matrices = [prod(x.shape) for x in parameters if layer_number(x.name) is None and len(x.shape) == 2]
    n_multiplied = count_parameters(parameters) - sum(matrices) + max(matrices, default=0)
    n_experts = next((config[key] for key in _N_EXPERTS if isinstance(config.get(key), int)), None)
    n_used = next((config[key] for key in _N_USED if config.get(key) is not None), None)
    used = n_used[: config.get("num_hidden_layers")] if isinstance(n_used, list) and n_used else [n_used]
    if n_experts is not None and all(type(n) is int and 0 < n <= n_experts for n in used):
        experts = count_parameters(x for x in parameters if _is_of_experts(x, n_experts))
        n_multiplied -= round(experts / n_experts * (n_experts - sum(used) / len(used)))
    return n_multiplied


def _is_of_experts(tensor: TensorInfo, n_experts: int) -> bool:
    """Return whether a tensor is of one expert, or of all experts joined, as gpt_oss and granitemoe store them."""
    is_joined = len(tensor.shape) == 3 and tensor.shape[0] == n_experts
    return ".experts." in tensor.name or is_joined


def without_buffers(tensors: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Return the tensors that are parameters, and not buffers that old checkpoints store."""
    return tuple(tensor for tensor in tensors if not is_buffer(tensor))


def count_by_layer(tensors: Iterable[TensorInfo]) -> dict[int, int]:
    """Return the number of parameters of each layer."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if (layer := layer_number(tensor.name)) is not None:
            sizes[layer] = sizes.get(layer, 0) + prod(tensor.shape)
    return sizes


def count_outside_layers(tensors: Iterable[TensorInfo]) -> int:
    """Return the number of parameters outside layers."""
    return sum(prod(tensor.shape) for tensor in tensors if layer_number(tensor.name) is None)


def count_lm_head(trained: Iterable[TensorInfo]) -> int:
    """Return the number of the LM head's parameters if it is trained, or is an embedding that is."""
    return max((prod(x.shape) for x in trained if layer_number(x.name) is None and len(x.shape) == 2), default=0)


def count_gathered(tensors: Collection[TensorInfo], n_layers: int) -> int:
    """Return the number of parameters that FSDP2 gathers: those outside layers, and some layers."""
    return count_outside_layers(tensors) + n_layers * max(count_by_layer(tensors).values(), default=0)
