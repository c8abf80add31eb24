"""Find a model's decoder layers, the units of compilation, sharding and activation checkpointing; compile them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.decoder.attention import exclude_segments_from_compilation
from model.decoder.config import is_native
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import LanguageModel
from model.language_model import read_language_config
from uptrain.models.load import build_meta_from_config


def decoder_layers(model: LanguageModel) -> list[nn.Module]:
    """Return the decoder layers."""
    if isinstance(model, LlamaForCausalLM):
        return list(model.model.layers)
    names = set(getattr(model.hf_model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def layer_class_names(folder: Path) -> tuple[str, ...]:
    """Return the class names of a folder's decoder layers, the units of FSDP. Needs no weights.

    They are empty if transformers does not name them. Names that its class shares with others, such as those of vision
    layers, are left out if the model has none: FSDP would fail.
    """
    if is_native(read_language_config(folder)):
        return ("Block",)
    return tuple(sorted({type(layer).__name__ for layer in decoder_layers(build_meta_from_config(folder))}))


def compile_layers(layers: list[nn.Module], **options: Any) -> None:
    """Compile each layer's forward pass with torch.compile, except attention by segments.

    Call this before `recompute_activations`. If torch.compile met attention by segments within a recomputed layer, it
    would compile nothing of it, without a message.
    """
    exclude_segments_from_compilation()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, **options)


def recompute_activations(layers: list[nn.Module]) -> None:
    """Recompute each layer's activations in the backward pass (activation checkpointing)."""
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from torch.utils.checkpoint import checkpoint

    def recomputed(*inputs: Any, **options: Any) -> Tensor:
        states_BTM: Tensor = checkpoint(forward, *inputs, use_reentrant=False, **options)
        return states_BTM

    return recomputed
