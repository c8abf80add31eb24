"""Make the optimizer: AdamW, Adafactor as in the GQA paper, or AdamW with states of 8 bits."""

from importlib.util import find_spec

import torch
from torch import nn

from model.common.errors import InputError
from uptrain.training.adafactor import Adafactor
from uptrain.training.compiler import check_compiler


def check_optimizer(name: str) -> None:
    """Raise InputError if the optimizer's library, or the compiler for it, is not installed."""
    if name == "adamw8bit":
        if find_spec("torchao") is None:
            raise InputError("--optimizer adamw8bit needs torchao: pip install torchao; or choose adamw.")
        check_compiler("--optimizer adamw8bit", "choose adamw")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, in place where it is a tensor: torchao compiles its step for that."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def applied_rate(optimizer: torch.optim.Optimizer, rate: float, update: int) -> float:
    """Return the learning rate of an update, counted from 1, for which `rate` is set: Adafactor's is ≤ 1 / √update."""
    return min(rate, update**-0.5) if isinstance(optimizer, Adafactor) else rate


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step_unless` works: torch's fused optimizers skip updates on the device, for gradient scalers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
    """Queue an update that leaves parameters and states unchanged if `skip`, a scalar on the device, is true."""
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]


def _not_decayed(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings and norms, of biases, and of all vectors.

    Some norms have a row for each head, and some biases one for each expert, so the number of dimensions does not tell.
    """
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim < 2
        or name.endswith("bias")
        or isinstance(module, nn.Embedding)
        or "norm" in type(module).__name__.lower()
    }


def make_optimizer(name: str, model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters, which must be float32 masters.

    Weight decay applies to matrices except the embedding, and not to norms and biases. The loop sets the learning rate
    at each step.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for parameter_name, parameter in trainable:
        assert parameter.dtype == torch.float32, (parameter_name, parameter.dtype)
    not_decayed = _not_decayed(model)
    groups = [
        {"params": [p for _, p in trainable if id(p) not in not_decayed], "weight_decay": weight_decay},
        {"params": [p for _, p in trainable if id(p) in not_decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adafactor":
        # Torch's default for the first is 1e-7. The squares of clipped gradients of large models are far below that,
        # so they would count as equal. The paper's 1e-30 would be squared, which float32 cannot hold.
        return Adafactor(groups, lr=0.0, eps=(1e-15, 1e-3))
    if name == "adamw8bit":
        from torchao.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
        return optimizer
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
