"""Count a model's parameters by the places where memory needs them: in layers, outside, and in the LM head."""

from collections.abc import Collection, Iterable
from math import prod

from model.checkpoint import TensorInfo
from model.checkpoint.tensor import is_buffer, layer_number


def count_parameters(tensors: Iterable[TensorInfo]) -> int:
    """Return the number of parameters, without the buffers that old checkpoints store."""
    return sum(prod(tensor.shape) for tensor in tensors if not is_buffer(tensor))


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


def count_head(trained: Iterable[TensorInfo]) -> int:
    """Return the number of the LM head's parameters if it is trained, or is an embedding that is."""
    return max((prod(x.shape) for x in trained if layer_number(x.name) is None and len(x.shape) == 2), default=0)


def count_gathered(tensors: Collection[TensorInfo], n_layers: int) -> int:
    """Return the number of parameters that FSDP2 gathers: those outside layers, and some layers."""
    return count_outside_layers(tensors) + n_layers * max(count_by_layer(tensors).values(), default=0)
