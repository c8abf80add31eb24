"""Cross-entropy over a large vocabulary without ever holding all logits.

The logits of N tokens are N x V numbers, often the largest tensor of a training step. Here they are made a chunk of
tokens at a time, and each chunk's gradients are taken at once, so that the backward pass only scales them.
"""

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
_CHUNK_LOGITS = 1 << 23
"""Logits held at a time: 32 MB in float32. Fewer would make too many passes over the weight's gradient."""


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
        weight_dtype = weight_VD.dtype
        device = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
            step = max(1, _CHUNK_LOGITS // len(weight_VD))
            # The same two buffers serve all chunks: fresh memory costs more than the arithmetic done in it.
            product_CV = hidden_ND.new_empty(min(step, len(labels_N)), len(weight_VD))
            logits_CV = product_CV if dtype == torch.float32 else torch.empty_like(product_CV, dtype=torch.float32)
            for start in range(0, len(labels_N), step):
                chunk = slice(start, start + step)
                hidden_CD, counts_C1 = hidden_ND[chunk], labels_N[chunk, None] != IGNORED
                size = len(hidden_CD)
                grad_CV = _loss_and_gradient(
                    hidden_CD, weight_VD, labels_N[chunk, None], counts_C1, loss, product_CV[:size], logits_CV[:size]
                )
                if grad_hidden is not None:
                    grad_hidden[chunk] = (grad_CV @ weight_VD) * counts_C1
                if grad_weight is not None and dtype == torch.float32:
                    grad_weight.addmm_(grad_CV.T, hidden_CD * counts_C1)
                elif grad_weight is not None:
                    grad_weight += grad_CV.T @ (hidden_CD * counts_C1)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = grad_outputs
        # In place, since fresh memory costs more than the product; autograd refuses a second backward pass.
        return (
            None if grad_hidden is None else grad_hidden.mul_(scale.to(grad_hidden.dtype)),
            None if grad_weight is None else grad_weight.mul_(scale.to(grad_weight.dtype)),
            None,
        )


def _loss_and_gradient(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    labels_C1: Tensor,
    counts_C1: Tensor,
    loss: Tensor,
    product_CV: Tensor,
    logits_CV: Tensor,
) -> Tensor:
    """Add a chunk's losses to `loss`; return d loss / d logits = softmax − one-hot, in the dtype of the products."""
    torch.mm(hidden_CD, weight_VD.T, out=product_CV)
    if logits_CV is not product_CV:
        logits_CV.copy_(product_CV)
    labels_C1 = labels_C1.clamp(min=0)
    chosen_C1, peak_C1 = logits_CV.gather(1, labels_C1), logits_CV.amax(dim=1, keepdim=True)
    sum_C1 = logits_CV.sub_(peak_C1).exp_().sum(dim=1, keepdim=True)
    loss += ((sum_C1.log() + peak_C1 - chosen_C1) * counts_C1).sum()
    logits_CV.div_(sum_C1)
    logits_CV.scatter_add_(1, labels_C1, logits_CV.new_full(labels_C1.shape, -1.0))
    return product_CV.copy_(logits_CV)
