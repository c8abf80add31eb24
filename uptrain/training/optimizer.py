"""Make the optimizer: AdamW, or Adafactor as in the GQA paper."""

import torch
from torch import nn


def make_optimizer(name: str, model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters, which must be float32 masters.

    Weight decay applies to matrices except the embedding, and not to norms and biases. The loop sets the learning rate
    at each step.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for parameter_name, parameter in trainable:
        assert parameter.dtype == torch.float32, (parameter_name, parameter.dtype)
    decayed = [p for n, p in trainable if p.ndim >= 2 and "embed" not in n]
    not_decayed = [p for n, p in trainable if p.ndim < 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0)
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
