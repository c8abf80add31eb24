"""Measure what the layers of transformers' classes keep for the backward pass, on tensors without memory.

A formula would have to know each class: how many norms a layer has, and whether they compute in float32, of which
autograd then keeps copies; norms of queries and keys; scores that the class computes itself. torch's fake tensors have
shapes, dtypes and a device only. The class's own code runs on them at any size, in tenths of a second.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from model.decoder.loading import LanguageModel
from model.decoder.transformers_classes import refusing
from uptrain.models.load import meta_student

_MAX_LAYERS = 4
"""The layers that are run, for speed. They include one of each kind, in the families that alternate kinds which keep
different tensors (every fourth layer of SmolLM3 and Cohere 2 has no rotary positions)."""


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that are kept for the backward pass of one window."""

    layer: float
    """Of a layer; the mean of those after the first."""
    outside: float
    """Outside layers: the mask, norms, capped logits; and what the first layer keeps more than the mean."""


def kept_bytes(folder: Path, trainable: str, seq_len: int, precision: str, lora_rank: int) -> KeptBytes:
    """Return what a folder's model keeps when a part of it is trained, by the headers of its files.

    Raises CheckpointError if its class in transformers does not run on fake tensors.
    """
    with (
        refusing(f"the activations of {folder} cannot be measured in transformers' class"),
        _quiet_without_grouped_mm(),
    ):
        models = [meta_student(folder, trainable, lora_rank, n) for n in (_MAX_LAYERS, 1)]
        deep, shallow = (_bytes_of_a_window(model, seq_len, precision) for model, _ in models)
    more_layers = models[0][1] - 1
    layer = (deep - shallow) / more_layers if more_layers else shallow
    return KeptBytes(layer, shallow - layer)


def _bytes_of_a_window(student: LanguageModel, seq_len: int, precision: str) -> int:
    """Return what a second window adds: weights and their casts, which autograd keeps too, do not depend on it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        _make_fake(student)
        one, two = (_saved_bytes(student, n, seq_len) for n in (1, 2))
    return two - one


def _make_fake(student: nn.Module) -> None:
    """Replace tensors on the meta device, for which autocast does nothing, by fake ones on the CPU."""
    for module in student.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            module.register_parameter(name, nn.Parameter(fake, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _saved_bytes(student: LanguageModel, n_windows: int, seq_len: int) -> int:
    """Return the bytes of all storages that autograd saves in a forward pass up to the logits."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    ids_BT = torch.zeros(n_windows, seq_len, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        student(ids_BT, None, torch.zeros_like(ids_BT))
    storages = [tensor.untyped_storage() for tensor in saved]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@contextmanager
def _quiet_without_grouped_mm() -> Iterator[None]:
    """Let torch log no failures, and let transformers multiply experts by its fallback.

    torch's grouped_mm takes float32 experts on real tensors only. Autograd saves the same tensors for both.
    """
    from transformers.integrations import moe

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, can_use = logger.disabled, getattr(moe, "_can_use_grouped_mm", None)
    logger.disabled = True
    if can_use is not None:
        moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        logger.disabled = was_disabled
        if can_use is not None:
            moe._can_use_grouped_mm = can_use
