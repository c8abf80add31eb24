"""Cross-entropy over a large vocabulary without ever holding all logits.

The logits of N tokens are N x V numbers, often the largest tensor of a training step. Here they are made a chunk of
tokens at a time, and each chunk's gradients are taken at once, so that the backward pass only scales them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
_CHUNK_LOGITS = 1 << 24
"""Logits held at a time: 64 MB in float32."""


def chunked_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of −log softmax(hidden · weightᵀ)[label] in float32, and the number of labels that count.

    Labels of −100 count for nothing. Matrix products run in autocast's dtype, everything after them in float32.
    """
    loss_sum: Tensor = _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N)  # type: ignore[no-untyped-call]
    return loss_sum, (labels_N != IGNORED).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        device = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        with torch.autocast(device, enabled=False):
            weight = weight_VD.to(dtype)
            grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
            grad_weight = torch.zeros_like(weight_VD) if wants_weight else None
            loss = hidden_ND.new_zeros((), dtype=torch.float32)
            step = max(1, _CHUNK_LOGITS // len(weight_VD))
            for start in range(0, len(labels_N), step):
                chunk = slice(start, start + step)
                hidden, labels = hidden_ND[chunk].to(dtype), labels_N[chunk, None].clamp(min=0)
                counts = labels_N[chunk, None] != IGNORED
                log_p = F.log_softmax((hidden @ weight.T).float(), dim=-1)
                loss -= (log_p.gather(1, labels) * counts).sum()
                if grad_hidden is None and grad_weight is None:
                    continue
                grad = log_p.exp_()  # d loss / d logits = softmax − one-hot
                grad.scatter_add_(1, labels, grad.new_full(labels.shape, -1.0))
                grad = grad.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[chunk] = (grad @ weight) * counts
                if grad_weight is not None:
                    grad_weight += grad.T @ (hidden * counts)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = grad_outputs
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            None,
        )
