"""Choose the parameters to train. The others stay frozen, in the checkpoint's dtype.

Frozen parameters have no float32 masters, gradients or optimizer states. The values of the computation are the same as
with float32 copies of them, because they are cast where they are used.
"""

from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.common.errors import InputError
from model.decoder.linear import matmul_dtype
from model.decoder.llama import RMSNorm
from model.language_model import read_language_config
from uptrain.models.language_model import LanguageModel
from uptrain.models.trainable_parts import part_pattern


class FrozenLinear(nn.Linear):
    """A linear layer whose weight and bias are cast to the dtype of the product, and have no gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == matmul_dtype(x):
            return F.linear(x, self.weight, self.bias)
        out: Tensor = _CastProduct.apply(x.to(matmul_dtype(x)), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


class _CastProduct(torch.autograd.Function):
    """x · weightᵀ + bias. The backward pass casts the weight again: autograd would keep the cast copy until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grad_outputs
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None, None


class AutocastExperts(nn.Module):
    """The experts of a layer, which transformers joins, with weights cast to the dtype of the products in use.

    `theirs`, transformers' class, computes in the dtype of its weights, also under autocast.
    """

    theirs: type[nn.Module]
    weight_names: tuple[str, ...]

    def forward(self, states: Tensor, *routing: Tensor) -> Tensor:
        weights = {name: getattr(self, name) for name in self.weight_names}
        dtype, experts = matmul_dtype(states), self
        if any(weight.dtype != dtype for weight in weights.values()):
            experts = copy(self)
            vars(experts).update({name: weight.to(dtype) for name, weight in weights.items()})
        out: Tensor = self.theirs.forward(experts, states, *routing)
        return out


@cache
def _autocasting(theirs: Any) -> Any:
    return type(f"Autocast{theirs.__name__}", (AutocastExperts, theirs), {"theirs": theirs})


def autocast_experts(model: LanguageModel) -> LanguageModel:
    """Let the experts of a model cast their weights in use; return the model."""
    for module in model.modules():
        _autocast_if_experts(module)
    return model


def _autocast_if_experts(module: nn.Module) -> None:
    theirs: Any = type(module)
    # transformers' decorator `use_experts_implementation` sets this attribute
    if hasattr(module, "_is_expert_parallel") and not isinstance(module, AutocastExperts):
        module.__class__ = _autocasting(theirs)
        vars(module)["weight_names"] = tuple(name for name, _ in module.named_parameters(recurse=False))


class FrozenEmbedding(nn.Embedding):
    """An embedding that returns states in the dtype of the model's other states."""

    state_dtype: torch.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).to(self.state_dtype)


def choose_trainable(student: LanguageModel, part: str, folder: Path) -> None:
    """Train a `part` of a folder's model, `attention` or `kv`. Raises InputError if the model does not have it."""
    pattern = part_pattern(part, read_language_config(folder))
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(bool(pattern.search(name)))
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise InputError(f"--trainable {part}: {folder} has no such tensors; use --trainable all.")


def set_dtypes(student: LanguageModel, frozen_dtype: torch.dtype) -> None:
    """Make float32 masters of trained parameters; hold frozen ones in `frozen_dtype` if their modules can cast them."""
    for parameter, dtype in _cast_and_choose_dtypes(student, frozen_dtype):
        parameter.data = parameter.data.to(dtype)


def set_dtypes_of_undefined(student: LanguageModel, frozen_dtype: torch.dtype) -> None:
    """Do the same with undefined weights. They stay unwritten, and so take no memory yet."""
    for parameter, dtype in _cast_and_choose_dtypes(student, frozen_dtype):
        if parameter.dtype != dtype:
            parameter.data = torch.empty_like(parameter.data, dtype=dtype)


def uncast_names(student: LanguageModel) -> list[str]:
    """Return the names of the parameters that stay float32 even if nothing is trained.

    Freezes the model and changes the classes of its modules: pass a model made for this.
    """
    dtypes = _cast_and_choose_dtypes(student.requires_grad_(False), torch.bfloat16)
    names = (name for name, _ in student.named_parameters())
    return [name for name, (_, dtype) in zip(names, dtypes, strict=True) if dtype == torch.float32]


def _cast_and_choose_dtypes(
    student: LanguageModel, frozen_dtype: torch.dtype
) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Make modules cast in use where they can; return each parameter with the dtype to hold it in."""
    wide: set[int] = set()  # a tied parameter belongs to two modules
    for module in student.modules():
        own = list(module.parameters(recurse=False))
        if any(parameter.requires_grad for parameter in own) or not make_cast_in_use(module, torch.float32):
            wide |= {id(parameter) for parameter in own}
    return [(p, torch.float32 if id(p) in wide else frozen_dtype) for p in student.parameters()]


def use_float32_states(teacher: LanguageModel) -> None:
    """Let a teacher in bfloat16 hold its hidden states in float32, as the student does under autocast.

    Equal models of bfloat16 checkpoints then give the same logits. (Of other checkpoints the teacher's norms and
    embedding are rounded to bfloat16, and the student's are not.) Vectors of modules that cannot cast them, such as the
    weights of transformers' norms, become float32. Its scaled embeddings (Gemma) stay as they are.
    """
    for module in teacher.modules():
        if not make_cast_in_use(module, torch.float32):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 1:
                    parameter.data = parameter.data.float()


def set_state_dtype(student: LanguageModel, dtype: torch.dtype) -> None:
    """Let frozen embeddings return states in `dtype`."""
    for module in student.modules():
        if isinstance(module, FrozenEmbedding):
            module.state_dtype = dtype


def make_cast_in_use(module: nn.Module, state_dtype: torch.dtype) -> bool:
    """Change a module's class to one that casts its parameters where it uses them; return whether there is one.

    `state_dtype` is the dtype of states that enter the model. Other modules of transformers cannot, such as its norms.
    """
    # Falcon's class computes the same, but for the rounding of a bias in bfloat16.
    if type(module) is nn.Linear or type(module).__name__ == "FalconLinear":
        module.__class__ = FrozenLinear
    elif type(module) is nn.Embedding:
        module.__class__ = FrozenEmbedding
    _autocast_if_experts(module)
    if isinstance(module, FrozenEmbedding):
        module.state_dtype = state_dtype
    return isinstance(module, FrozenLinear | FrozenEmbedding | AutocastExperts | RMSNorm)
