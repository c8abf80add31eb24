"""Freeze the parameters that are not trained, in the checkpoint's dtype.

They have no float32 masters, gradients or optimizer states, and are cast where they are used
(`uptrain.models.casting_layers`).
"""

from pathlib import Path

import torch
from torch import nn

from model.common.errors import InputError
from model.decoder.loading import LanguageModel
from model.language_model import read_language_config
from uptrain.models.casting_layers import make_cast_at_use
from uptrain.models.trainable_parts import part_pattern


def freeze_all_but(student: LanguageModel, trainable: str, folder: Path) -> None:
    """Freeze all parameters but those of `attention` or `kv`. Raises InputError if the folder's model has none."""
    pattern = part_pattern(trainable, read_language_config(folder))
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(bool(pattern.search(name)))
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise InputError(f"--trainable {trainable}: {folder} has no such tensors; use --trainable all.")


def set_dtypes(student: LanguageModel, frozen_dtype: torch.dtype) -> None:
    """Make float32 masters of trained parameters; hold frozen ones in `frozen_dtype` if their modules can cast them."""
    for parameter, dtype in _cast_and_choose_dtypes(student, frozen_dtype):
        parameter.data = parameter.data.to(dtype)


def set_dtypes_of_uninitialized(student: LanguageModel, frozen_dtype: torch.dtype) -> None:
    """Like `set_dtypes`, for uninitialised weights, which stay unwritten, and so take no memory yet."""
    for parameter, dtype in _cast_and_choose_dtypes(student, frozen_dtype):
        if parameter.dtype != dtype:
            parameter.data = torch.empty_like(parameter.data, dtype=dtype)


def always_float32_names(student: LanguageModel) -> list[str]:
    """Return the names of the parameters that stay float32 even if nothing is trained.

    Freezes the model and changes the classes of its modules: pass a model made for this.
    """
    dtypes = _cast_and_choose_dtypes(student.requires_grad_(False), torch.bfloat16)
    names = (name for name, _ in student.named_parameters())
    return [name for name, (_, dtype) in zip(names, dtypes, strict=True) if dtype == torch.float32]


def _cast_and_choose_dtypes(
    student: LanguageModel, frozen_dtype: torch.dtype
) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Make modules cast at use where they can; return each parameter with the dtype to hold it in."""
    float32_ids: set[int] = set()  # a tied parameter belongs to two modules
    for module in student.modules():
        own = list(module.parameters(recurse=False))
        if any(parameter.requires_grad for parameter in own) or not make_cast_at_use(module, torch.float32):
            float32_ids |= {id(parameter) for parameter in own}
    return [(p, torch.float32 if id(p) in float32_ids else frozen_dtype) for p in student.parameters()]
