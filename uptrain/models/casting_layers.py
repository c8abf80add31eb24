"""Layers that cast their parameters to the dtype of the computation where they use them.

The values of the computation are the same as with float32 copies of the parameters.
"""

from copy import copy
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoder.linear import matmul_dtype
from model.decoder.llama import RMSNorm
from model.decoder.loading import LanguageModel
from model.decoder.transformers_model import TransformersModel


class FrozenLinear(nn.Linear):
    """A linear layer whose weight and bias are cast to the dtype of the product, and have no gradients."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, dtype = self.weight, self.bias, matmul_dtype(x)
        # A teacher may share the bias alone with the student, and have its own weight in another dtype.
        if weight.dtype == dtype and (bias is None or bias.dtype == dtype):
            return F.linear(x, weight, bias)
        out: Tensor = _CastProduct.apply(x.to(dtype), weight, bias)  # type: ignore[no-untyped-call]
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

    `experts`, transformers' class, computes in the dtype of its weights, also under autocast.
    """

    experts: type[nn.Module]
    weight_names: tuple[str, ...]

    def forward(self, states: Tensor, *routing: Tensor) -> Tensor:
        weights = {name: getattr(self, name) for name in self.weight_names}
        dtype, module = matmul_dtype(states), self
        if any(weight.dtype != dtype for weight in weights.values()):
            module = copy(self)
            vars(module).update({name: weight.to(dtype) for name, weight in weights.items()})
        out: Tensor = self.experts.forward(module, states, *routing)
        return out


@cache
def _autocasting(experts: Any) -> Any:
    return type(f"Autocast{experts.__name__}", (AutocastExperts, experts), {"experts": experts})


def autocast_experts(model: LanguageModel) -> LanguageModel:
    """Let the experts of a model cast their weights in use; return the model."""
    for module in model.modules():
        _autocast_if_experts(module)
    return model


def _autocast_if_experts(module: nn.Module) -> None:
    experts: Any = type(module)
    # transformers' decorator `use_experts_implementation` sets this attribute
    if hasattr(module, "_is_expert_parallel") and not isinstance(module, AutocastExperts):
        module.__class__ = _autocasting(experts)
        vars(module)["weight_names"] = tuple(name for name, _ in module.named_parameters(recurse=False))


class FrozenEmbedding(nn.Embedding):
    """An embedding that returns states in the dtype of the model's other states."""

    state_dtype: torch.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).to(self.state_dtype)


def use_float32_states(teacher: LanguageModel) -> None:
    """Let a teacher in bfloat16 hold its hidden states in float32, as the student does under autocast.

    Equal models of bfloat16 checkpoints then give the same logits. (Of other checkpoints the teacher's norms and
    embedding are rounded to bfloat16, and the student's are not.) Vectors of modules that cannot cast them, such as the
    weights of transformers' norms, become float32. Its scaled embeddings (Gemma) stay as they are.
    """
    for module in teacher.modules():
        if not make_cast_at_use(module, torch.float32):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 1:
                    parameter.data = parameter.data.float()


def set_state_dtype(student: LanguageModel, dtype: torch.dtype) -> None:
    """Prepare a model for layers that FSDP2 gives states in `dtype`.

    Frozen embeddings of the native model return it; transformers' classes make masks in it.
    """
    if isinstance(student, TransformersModel):
        student.state_dtype = dtype
        return
    for module in student.modules():
        if isinstance(module, FrozenEmbedding):
            module.state_dtype = dtype


def make_cast_at_use(module: nn.Module, state_dtype: torch.dtype) -> bool:
    """Change a module's class to one that casts its parameters at use; return whether it now does.

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
