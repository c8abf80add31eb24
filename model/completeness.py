"""Check that a checkpoint lacks none of the tensors besides attention's: its class fills a gap with random numbers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from model.attention_layout import Attention
from model.checkpoint import Checkpoint
from model.checkpoint.tensor import ROPE_BUFFER
from model.common import checks
from model.common.errors import CheckpointError

EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "word_embeddings.weight", "wte.weight", "shared.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
FINAL_NORMS = ("norm.weight", "final_layernorm.weight", "final_layer_norm.weight", "ln_f.weight", "norm_f.weight")
"""Ends of the names of each in all families."""


def check_complete(attention: Attention, config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a layer, or what comes before and after the layers, lacks a tensor.

    `config`: that of the language model.
    """
    prefixes = list(dict.fromkeys(prefix for prefix, _ in attention.present))
    layers = _parts(attention, prefixes, checkpoint)
    _check_layers(layers)
    stack = re.sub(r"[^.]+\.\d+\.$", "", prefixes[0])
    _check_embedding(config, checkpoint)
    norms = [f"{stack}{name}" for name in FINAL_NORMS]
    has_norms = any("norm" in part or "ln_" in part for part in layers[prefixes[0]])
    if has_norms and not any(name in checkpoint.tensors for name in norms):
        raise _incomplete("a norm after the last layer", norms)
    classes = checkpoint.config.get("architectures")
    # A base model, whose names have no prefix, has no head.
    has_head = isinstance(classes, list) and len(classes) == 1 and str(classes[0]).endswith("ForCausalLM") and stack
    is_untied = checkpoint.config.get("tie_word_embeddings") is False
    if has_head and is_untied and not any(name.endswith(HEADS) for name in checkpoint.tensors):
        raise _incomplete("an output head, which config.json does not tie to the embedding", HEADS)


def _parts(attention: Attention, prefixes: list[str], checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Return the names of each layer's tensors, without the layer's prefix. Buffers and the like are left out."""
    family = attention.family
    ignored = tuple(f"{place}.{part}" for place in family.attention for part in (*family.not_per_head, ROPE_BUFFER))
    parts: dict[str, set[str]] = {prefix: set() for prefix in prefixes}
    for name in checkpoint.tensors:
        ends = (match.end() for match in re.finditer(r"(?:^|\.)\d+\.", name))
        end = next((end for end in ends if name[:end] in parts), None)
        if end is not None and not name.endswith(ignored):
            parts[name[:end]].add(name[end:])
    return parts


def _check_layers(layers: Mapping[str, set[str]]) -> None:
    """Raise CheckpointError if a layer lacks a tensor that others have, and has none in its place.

    Layers may differ: one with experts has no dense MLP. Then each has tensors that the other does not have.
    """
    kinds = {frozenset(names): prefix for prefix, names in layers.items()}
    for names, prefix in kinds.items():
        more = next((others for others in kinds if names < others), None)
        if more is not None:
            raise CheckpointError(
                f"the tensor {prefix}{min(more - names)} is missing, which other layers have; the checkpoint is "
                "incomplete."
            )


def _check_embedding(config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the embedding is missing, or does not have `vocab_size` rows."""
    name = next((name for name in checkpoint.tensors if name.endswith(EMBEDDINGS)), None)
    if name is None:
        raise _incomplete("an embedding", EMBEDDINGS)
    tensor, vocab_size = checkpoint.tensors[name], config.get("vocab_size")
    if vocab_size is not None and tensor.shape[:1] != (vocab_size,):
        raise CheckpointError(
            f"config.json says vocab_size = {checks.show(vocab_size)}, but {name} has shape {tensor.shape}; they do "
            "not match."
        )


def _incomplete(what: str, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"the checkpoint lacks {what} (looked for {', '.join(names)}); it is incomplete.")
