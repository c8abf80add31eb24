"""Linear maps: the dtype of their products, and weights prepacked for decoding on a CPU.

Letters: B batch, T tokens, I in, O out.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product of x: autocast's if that is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class PrepackedLinear(nn.Module):
    """x · weightᵀ + bias, without gradients, with the weight in the layout that oneDNN reads fastest.

    oneDNN is a library for products on a CPU. A plain weight has another layout, so for the few rows of a decoding step
    torch uses slower code, which takes up to 3 times as long. A prepacked weight cannot be saved, moved or copied.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach())
        self.bias = None if bias_O is None else bias_O.detach().to(weight_OI.dtype)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        raise RuntimeError("a prepacked model cannot be saved; load it again, and leave out prepack().")

    def _apply(self, *arguments: Any) -> Self:
        raise RuntimeError("a prepacked model cannot be moved or cast; load it again, and leave out prepack().")

    def forward(self, x_BTI: Tensor) -> Tensor:
        out_BTO: Tensor = torch.ops.mkldnn._linear_pointwise(x_BTI, self.weight, self.bias, "none", [], "")
        return out_BTO


def can_prepack(weight_OI: Tensor) -> bool:
    """Return whether this torch and this processor multiply prepacked weights of the weight's dtype."""
    if not weight_OI.is_cpu or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops, dtype = torch.ops.mkldnn, weight_OI.dtype
    try:  # these operators are not public: another torch may lack them, and another processor may not run them
        if dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
            return False
        if dtype == torch.float16 and not ops._is_mkldnn_fp16_supported():
            return False
        x_11I = torch.arange(16, dtype=dtype, device="cpu").view(1, 1, 16)
        identity_II = torch.eye(16, dtype=dtype, device="cpu")
        return torch.equal(PrepackedLinear(identity_II, None)(x_11I), x_11I)
    except (AttributeError, RuntimeError):
        return False


def prepack_linears(module: nn.Module, skip: str) -> None:
    """Replace the linear maps below a module, but for those called `skip`. The old weights are freed one by one."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name != skip:
            setattr(module, name, PrepackedLinear(child.weight, child.bias))
        else:
            prepack_linears(child, skip)
