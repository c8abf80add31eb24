"""Students and teachers: read from a checkpoint, drawn at random, or empty until a training checkpoint fills them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.checkpoint import open_checkpoint
from model.checkpoint.hf_folder import read_config
from model.common import checks, console
from model.common.errors import InputError
from model.decoder import attention, loading
from model.decoder.config import NATIVE_FAMILIES, read_llama_config
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import load_model
from model.decoder.transformers_model import TransformersModel, build_foreign, layer_class_names
from uptrain.training.language_model import LanguageModel


def load_student(folder: Path) -> LanguageModel:
    """Read a model to be trained, as float32 masters."""
    return load_model(folder, torch.float32)


def load_teacher(folder: Path, precision: str) -> LanguageModel:
    """Read a model to learn from; it has no gradients."""
    return load_model(folder, _teacher_dtype(precision)).requires_grad_(False)


def empty_student(folder: Path) -> LanguageModel:
    """Return the model of a folder's config.json with undefined weights, as float32 masters."""
    return _empty(folder, torch.float32)


def empty_teacher(folder: Path, precision: str) -> LanguageModel:
    """Return the model of a folder's config.json with undefined weights, without gradients."""
    return _empty(folder, _teacher_dtype(precision)).requires_grad_(False)


def _teacher_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _empty(folder: Path, dtype: torch.dtype) -> LanguageModel:
    _, config = read_config(folder)
    if config.get("model_type") in NATIVE_FAMILIES:
        with torch.device("meta"):
            model = LlamaForCausalLM(read_llama_config(config)).to(dtype)
        try:
            return model.to_empty(device="cpu").eval()
        except RuntimeError as error:  # so torch says that there is not so much memory
            nbytes = sum(parameter.nbytes for parameter in model.parameters())
            raise InputError(
                f"{folder}/config.json describes a model of {console.size(nbytes)}, for which there is no memory; "
                "correct its sizes, or use a machine with more."
            ) from error
    return TransformersModel(build_foreign(folder, dtype)).eval()


def build_meta(folder: Path) -> LanguageModel:
    """Return the model of a folder without memory: what can be known of it before it is read.

    Raises CheckpointError where the files of a native model do not hold its parameters.
    """
    with open_checkpoint(folder) as checkpoint:
        if checkpoint.config.get("model_type") in NATIVE_FAMILIES:
            return loading.build_meta(checkpoint)[0]
    with torch.device("meta"):
        return TransformersModel(build_foreign(folder, torch.float32))


def parameter_names(folder: Path) -> tuple[tuple[str, ...], str]:
    """Return what the parameters of a folder's model are called in memory, and the part that its files may lack.

    Nothing for our own code, whose names are those of the files.
    """
    _, config = read_config(folder)
    if config.get("model_type") in NATIVE_FAMILIES:
        return (), ""
    with torch.device("meta"):
        model = build_foreign(folder, torch.float32)
    return tuple(name for name, _ in model.named_parameters()), f"{model.base_model_prefix}."


def random_student(folder: Path, seed: int) -> LanguageModel:
    """Return the model of a folder's config.json with weights drawn anew, as GPT-2 and Llama begin.

    Normal with `initializer_range` (0.02 if config.json names none); what is added to the stream is divided by
    √(2 · layers), so that the stream does not grow with depth (Radford et al. 2019). Norms are 1, biases 0.
    """
    _, config = read_config(folder)
    student = empty_student(folder)
    if not isinstance(student, LlamaForCausalLM):
        raise InputError(f"--init: model_type {config.get('model_type')!r} has no native code; use a Llama config.")
    std = checks.number(config.get("initializer_range", 0.02), "config.json has initializer_range")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * student.config.n_layers) ** -0.5 if to_stream else 1.0
                parameter.normal_(std=std * scale, generator=generator)
    return student


def block_names(folder: Path) -> tuple[str, ...]:
    """Return the class names of the layers of a folder's model, which are sharded one by one."""
    _, config = read_config(folder)
    return ("Block",) if config.get("model_type") in NATIVE_FAMILIES else layer_class_names(folder)


def compile_layers(layers: list[nn.Module], **options: Any) -> None:
    """Let torch.compile make each layer faster, all but attention by documents.

    That would be compiled anew for each batch, whose documents have other lengths.
    """
    # Not where it is defined, since that would load the compiler with the model.
    attention.by_segment = torch.compiler.disable(attention.by_segment)  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(**options)


def recompute_activations(layers: list[nn.Module]) -> None:
    """Let the backward pass compute each layer anew instead of keeping what it computed."""
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from torch.utils.checkpoint import checkpoint

    def recomputed(*inputs: Any, **options: Any) -> Tensor:  # torch.compile would pass over a `partial` of checkpoint
        found: Tensor = checkpoint(forward, *inputs, use_reentrant=False, **options)
        return found

    return recomputed
