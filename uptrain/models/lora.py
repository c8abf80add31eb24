"""Add low-rank adapters (LoRA; Hu et al. 2021) to a frozen model: x · weightᵀ + (x · Aᵀ) · Bᵀ.

Names and initial values are those of the library peft: `lora_A` with Kaiming-uniform values, `lora_B` with zeros, so
that training begins at the model. The scale, peft's lora_alpha / r, is 1. peft itself renames the frozen parameters,
by which the teacher shares them, checkpoints leave them out and files hold them; so it is not used.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from model.common.errors import InputError
from model.decoder.loading import LanguageModel
from uptrain.models.casting_layers import FrozenLinear, make_cast_at_use
from uptrain.models.trainable_choices import check_lora_rank

_OF_LAYER = re.compile(r"\.\d+\.")


class AdaptedLinear(FrozenLinear):
    """A frozen linear layer with an adapter, whose matrices are the modules `lora_A` and `lora_B`."""

    lora_A: nn.Linear
    lora_B: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.lora_B(self.lora_A(x))
        return super().forward(x) + added


def add_adapters(student: LanguageModel, lora_rank: int) -> None:
    """Freeze a model, and give an adapter of float32 zeros to each linear layer of its decoder layers.

    Raises InputError if the model has none, or if the rank exceeds what all of them can have.
    """
    student.requires_grad_(False)
    adapted = [
        module
        for name, module in student.named_modules()
        if isinstance(module, nn.Linear) and _OF_LAYER.search(name) and make_cast_at_use(module, torch.float32)
    ]
    if not adapted:
        raise InputError("--trainable lora: the model's layers have no linear layers that can be adapted; train all.")
    check_lora_rank(lora_rank, max(min(module.in_features, module.out_features) for module in adapted))
    for module in adapted:
        module.__class__ = AdaptedLinear
        like: dict[str, Any] = {"device": module.weight.device, "dtype": torch.float32}
        module.lora_A = nn.Linear(module.in_features, lora_rank, bias=False, **like)
        module.lora_B = nn.Linear(lora_rank, module.out_features, bias=False, **like)
        for adapter in (module.lora_A, module.lora_B):
            nn.init.zeros_(adapter.weight)


def initialise_adapters(student: LanguageModel, seed: int) -> None:
    """Draw the values of each `lora_A`, uniform in ±√(1 / in_features); `lora_B` is zero."""
    generator = torch.Generator().manual_seed(seed)
    for module in student.modules():
        if isinstance(module, AdaptedLinear):
            nn.init.kaiming_uniform_(module.lora_A.weight, a=math.sqrt(5), generator=generator)
