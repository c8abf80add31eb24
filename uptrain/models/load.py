"""Build students and teachers: loaded, with random weights, uninitialised for a training checkpoint, or on meta."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from model.checkpoint.tensor import TORCH_DTYPES
from model.common import checks, console
from model.common.errors import InputError
from model.decoder import loading
from model.decoder.config import is_native, read_llama_config
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import LanguageModel, load_model
from model.decoder.transformers_classes import build_hf_model
from model.decoder.transformers_model import TransformersModel, check_separation
from model.language_model import open_language_model, read_language_config
from uptrain.models.casting_layers import autocast_experts, use_float32_states
from uptrain.models.frozen_parameters import (
    freeze_all_but,
    set_dtypes,
    set_dtypes_of_uninitialized,
)
from uptrain.models.lora import add_adapters
from uptrain.models.trainable_parts import common_dtype


def load_student(folder: Path, trainable: str = "all", lora_rank: int = 0) -> LanguageModel:
    """Load a model to train a part of it: float32 masters of that part, the rest in the checkpoint's dtype.

    `lora_rank` is that of the adapters of the part `lora`, which are zero.
    """
    if trainable == "all":
        return autocast_experts(load_model(folder, torch.float32))
    dtype, frozen_dtype = _dtypes(folder)
    student = load_model(folder, dtype)
    make_trainable(student, trainable, lora_rank, folder)
    set_dtypes(student, frozen_dtype)
    return student


def load_evaluated(folder: Path) -> LanguageModel:
    """Load a model to evaluate it: all in the checkpoint's dtype, with the results of `load_student`."""
    dtype, frozen_dtype = _dtypes(folder)
    model = load_model(folder, dtype).requires_grad_(False)
    set_dtypes(model, frozen_dtype)
    return model


def load_teacher(
    folder: Path, precision: str, *, float32_states: bool, skip: Container[str] = ()
) -> LanguageModel:  # fmt: skip
    """Load a teacher, without gradients. `skip` is as for `load_model`.

    `float32_states`: in bf16, let it hold its hidden states in float32 (`use_float32_states`). Without, all of it is
    bfloat16, as shards need it.
    """
    teacher = load_model(folder, teacher_dtype(precision), skip=skip).requires_grad_(False)
    if float32_states and precision == "bf16":
        use_float32_states(teacher)
    return teacher


def uninitialized_student(folder: Path, trainable: str = "all", lora_rank: int = 0) -> LanguageModel:
    """Return the model of a folder's config.json with uninitialised weights, in the dtypes of `load_student`."""
    if trainable == "all":
        return autocast_experts(_uninitialized(folder, torch.float32))
    dtype, frozen_dtype = _dtypes(folder)
    student = _uninitialized(folder, dtype)
    make_trainable(student, trainable, lora_rank, folder)
    set_dtypes_of_uninitialized(student, frozen_dtype)
    return student


def uninitialized_teacher(folder: Path, precision: str) -> LanguageModel:
    """Return the model of a folder's config.json with uninitialised weights, without gradients."""
    return _uninitialized(folder, teacher_dtype(precision)).requires_grad_(False)


def _dtypes(folder: Path) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to build a folder's model in, and that of its tensors, which frozen parameters get then.

    transformers would round some buffers to the dtype that it loads, such as the scale of Gemma's embedding. So its
    models are built in float32. The checkpoint's dtype holds the frozen parameters exactly.
    """
    with open_language_model(folder) as checkpoint:
        name = common_dtype(checkpoint.tensors.values())
        native = is_native(checkpoint.config)
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[name])
    return dtype if native else torch.float32, dtype


def make_trainable(student: LanguageModel, trainable: str, lora_rank: int, folder: Path) -> None:
    """Freeze all parameters but those of a part other than `all`; of `lora` but those of new adapters.

    Raises InputError if the model of this folder does not have the part.
    """
    if trainable == "lora":
        add_adapters(student, lora_rank)
    else:
        freeze_all_but(student, trainable, folder)


def teacher_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _uninitialized(folder: Path, dtype: torch.dtype) -> LanguageModel:
    config = read_language_config(folder)
    if is_native(config):
        with torch.device("meta"):
            model = LlamaForCausalLM(read_llama_config(config)).to(dtype)
        try:
            return model.to_empty(device="cpu").eval()
        except RuntimeError as error:  # torch raises it when memory does not suffice
            nbytes = sum(parameter.nbytes for parameter in model.parameters())
            raise InputError(
                f"{folder}/config.json describes a model of {console.format_bytes(nbytes)}, which does not fit into "
                "memory; correct its sizes, or use a machine with more."
            ) from error
    return TransformersModel(_uninitialized_hf_model(folder, dtype)).eval()


def _uninitialized_hf_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return transformers' model of a folder's config.json, whose weights take no memory until they are written.

    Its buffers are computed, because training checkpoints lack most of them.
    """
    with init_empty_weights(include_buffers=False):
        model = build_hf_model(folder, dtype)
    for module in model.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            parameter = nn.Parameter(torch.empty_like(meta, device="cpu"), requires_grad=meta.requires_grad)
            module.register_parameter(name, parameter)
    model.tie_weights()  # type: ignore[operator]
    return model


def build_meta_from_folder(folder: Path) -> LanguageModel:
    """Return the model of a folder on the meta device, for checks before it is loaded.

    Raises CheckpointError if the files of a native model lack its parameters.
    """
    if not is_native(read_language_config(folder)):
        return build_meta_from_config(folder)
    with open_language_model(folder) as checkpoint:
        return loading.build_meta(checkpoint)[0]


def build_meta_from_config(folder: Path) -> LanguageModel:
    """Return the model of a folder's config.json on the meta device; the folder needs no weights."""
    config = read_language_config(folder)
    with torch.device("meta"):
        if is_native(config):
            return LlamaForCausalLM(read_llama_config(config))
        return TransformersModel(build_hf_model(folder, torch.float32))


def meta_student(folder: Path, trainable: str, lora_rank: int, n_layers: int) -> tuple[LanguageModel, int]:
    """Return what `load_student` returns, on the meta device and cut to `n_layers` decoder layers, and how many it has.

    Only for transformers' classes that name the class of their decoder layers (`_no_split_modules`).
    """
    student, (_, frozen_dtype) = build_meta_from_config(folder), _dtypes(folder)
    assert isinstance(student, TransformersModel)
    kinds: Any = student.hf_model._no_split_modules
    layers = next(
        module
        for module in student.modules()
        if isinstance(module, nn.ModuleList) and type(module[0]).__name__ in kinds
    )
    del layers[n_layers:]
    config: Any = student.hf_model.config
    config.num_hidden_layers = len(layers)  # some classes count by it
    if trainable == "all":
        autocast_experts(student)
    else:
        make_trainable(student, trainable, lora_rank, folder)
        set_dtypes(student, frozen_dtype)
    return student, len(layers)


def random_student(folder: Path, seed: int) -> LanguageModel:
    """Return the model of a folder's config.json with random weights.

    Native models are initialised like GPT-2: weights are normal with standard deviation `initializer_range` (default
    0.02). Matrices that write to the residual stream are divided by √(2 · layers), so that the stream does not grow
    with depth (Radford et al. 2019). Norms are 1, biases 0. Other models are initialised by their class in
    transformers.
    """
    config = read_language_config(folder)
    if not is_native(config):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = TransformersModel(build_hf_model(folder, torch.float32)).eval()
        check_separation(model)
        return autocast_experts(model)
    student = uninitialized_student(folder)
    assert isinstance(student, LlamaForCausalLM)
    std = checks.number(config.get("initializer_range", 0.02), "config.json has initializer_range")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                writes_to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * student.config.n_layers) ** -0.5 if writes_to_stream else 1.0
                parameter.normal_(std=std * scale, generator=generator)
    return student
