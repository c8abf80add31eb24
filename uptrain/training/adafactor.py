"""Adafactor (Shazeer and Stern 2018) in the form of torch's, for shards of FSDP2 too.

Torch's step fails on a DTensor: it squares the norms of columns in place. These are partial norms, one for each shard,
and the square of their combination is not a partial norm ("in-place operations that require placement changes are not
supported", torch 2.13). Here the squares are new tensors, for which DTensor adds up the shards.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class Adafactor(torch.optim.Adafactor):
    """Torch's Adafactor, with a step of its own for parameters in shards. States have torch's names and values."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return super().step(closure)  # type: ignore[no-untyped-call]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)
        return None


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update a sharded parameter. Each process has whole row and column states, and its shard of everything else."""
    if not state:
        _initialise(state, gradient)
    state["step"] += 1
    step, rate = state["step"].item(), group["lr"]
    smallest = group["eps"][0] or torch.finfo(parameter.dtype).eps
    weight = step ** group["beta2_decay"]
    relative = min(rate, step**-0.5) * max(group["eps"][1], _root_mean_square(parameter))
    parameter.mul_(1 - rate * group["weight_decay"])
    if "variance" in state:
        state["variance"].lerp_(gradient * gradient, weight)
        estimate = state["variance"]
    else:
        rows, columns = state["row_var"], state["col_var"]
        for means, dim in ((rows, -1), (columns, -2)):
            means.lerp_(_whole(torch.norm(gradient, dim=dim, keepdim=True).square() / gradient.shape[dim]), weight)
        scale = rows.mean(dim=-2, keepdim=True).clamp(min=smallest)
        estimate = _like(rows / scale, parameter) * columns
    update = estimate.clamp(min=smallest**2).rsqrt_().mul_(gradient)
    parameter.add_(update, alpha=-relative / max(1.0, _root_mean_square(update) / group["d"]))


def _initialise(state: dict[str, Tensor], gradient: Tensor) -> None:
    state["step"] = torch.tensor(0.0)
    if gradient.dim() > 1:
        state["row_var"] = _whole(gradient.new_zeros((*gradient.shape[:-1], 1)))
        state["col_var"] = _whole(gradient.new_zeros((*gradient.shape[:-2], 1, gradient.shape[-1])))
    else:
        state["variance"] = torch.zeros_like(gradient)


def _whole(tensor: Tensor) -> Tensor:
    """Return a DTensor that each process has whole."""
    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a whole DTensor sharded like another."""
    assert isinstance(tensor, DTensor) and isinstance(other, DTensor)
    return tensor.redistribute(placements=other.placements)


def _root_mean_square(tensor: Tensor) -> float:
    norm = torch.linalg.vector_norm(tensor)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole.item() / math.sqrt(tensor.numel())
