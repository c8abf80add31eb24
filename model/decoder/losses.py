"""Compute cross-entropy and other losses over a large vocabulary in chunks, without storing all logits.

The logits of N tokens are N x V elements, often the largest tensor of a training step. Here they are computed for one
chunk of tokens at a time. The gradients of a chunk are computed in the forward pass; the backward pass scales them.

Letters: B batch, T tokens of a row; N tokens, C tokens of a chunk, M hidden size, V vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model.decoder.chunk_size import chunk_size
from model.decoder.linear import matmul_dtype

IGNORED = -100
"""The label of tokens without a loss."""
LossAndGradient = Callable[[slice, Tensor], Tensor]
"""Takes a chunk of tokens and their float32 logits [C, V]; returns their losses [C, 1], and overwrites the logits with
d loss / d logits."""
_SCALED_ROWS = 1024
"""Rows of a gradient in half precision that are scaled at a time."""


def next_token_targets(labels_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Return the target of each token but the last, [B, T − 1]; IGNORED where the next begins another document."""
    targets_BT = labels_BT[:, 1:]
    if documents_BT is None:
        return targets_BT
    return targets_BT.masked_fill(documents_BT[:, 1:] != documents_BT[:, :-1], IGNORED)


def chunked_cross_entropy(hidden_NM: Tensor, weight_VM: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of −log softmax(hidden · weightᵀ)[label] in nats, float32, and the number of labels that count.

    Labels of −100 (IGNORED) do not count.
    """
    has_target_N = labels_N != IGNORED
    return chunked_loss(hidden_NM, weight_VM, has_target_N, cross_entropy_of_chunks(labels_N)), has_target_N.sum()


def cross_entropy_of_chunks(labels_N: Tensor) -> LossAndGradient:
    """Return the cross-entropy for `chunked_loss`. What it computes for labels of −100 must not be used."""
    labels_N1 = labels_N.clamp(min=0)[:, None]
    return lambda chunk, logits_CV: _cross_entropy(labels_N1[chunk], logits_CV)


def _cross_entropy(labels_C1: Tensor, logits_CV: Tensor) -> Tensor:
    """Return the losses, and overwrite the logits with softmax − one-hot."""
    chosen_C1, peak_C1 = logits_CV.gather(1, labels_C1), logits_CV.amax(dim=1, keepdim=True)
    sum_C1 = logits_CV.sub_(peak_C1).exp_().sum(dim=1, keepdim=True)
    logits_CV.div_(sum_C1)
    logits_CV.scatter_add_(1, labels_C1, logits_CV.new_full(labels_C1.shape, -1.0))
    return sum_C1.log() + peak_C1 - chosen_C1


def chunked_loss(
    hidden_NM: Tensor, weight_VM: Tensor, has_target_N: Tensor, loss_and_gradient: LossAndGradient
) -> Tensor:
    """Return the float32 sum of a loss over the tokens where `has_target_N` is True. Logits are hidden · weightᵀ.

    Matrix products run in autocast's dtype, all other operations in float32.
    """
    loss_sum: Tensor = _ChunkedLoss.apply(hidden_NM, weight_VM, has_target_N, loss_and_gradient)  # type: ignore[no-untyped-call]
    return loss_sum


class ChunkLogits:
    """The logits of one chunk, of at most `max_tokens`, at a time.

    All chunks share memory: new memory costs more than the arithmetic.

    In half precision, a GPU's products are written in float32. Elsewhere they are rounded first: a logit of 20 to a
    multiple of 0.125 in bfloat16, so that the divergence of models that are nearly equal may be off by 0.001.
    """

    def __init__(self, hidden_NM: Tensor, weight_VM: Tensor, max_tokens: int) -> None:
        dtype = matmul_dtype(hidden_NM)
        self.hidden_NM, self.weight_VM = hidden_NM.detach().to(dtype), weight_VM.detach().to(dtype)
        shape = (min(max_tokens, len(hidden_NM)), len(weight_VM))
        self._product_CV = self.hidden_NM.new_empty(shape)
        in_place = dtype == torch.float32
        self._logits_CV = self._product_CV if in_place else self.hidden_NM.new_empty(shape, dtype=torch.float32)
        self._widens = not in_place and _can_widen(hidden_NM.device.type, dtype)

    def of(self, chunk: slice) -> Tensor:
        """Return the float32 logits of a chunk, [C, V]. The caller may overwrite them; the next call does."""
        hidden_CM = self.hidden_NM[chunk]
        product_CV, logits_CV = self._product_CV[: len(hidden_CM)], self._logits_CV[: len(hidden_CM)]
        if self._widens:
            torch.ops.aten.mm.dtype_out(hidden_CM, self.weight_VM.T, torch.float32, out=logits_CV)
            return logits_CV
        torch.mm(hidden_CM, self.weight_VM.T, out=product_CV)
        return product_CV if self._logits_CV is self._product_CV else logits_CV.copy_(product_CV)

    def in_matmul_dtype(self, gradient_CV: Tensor) -> Tensor:
        """Return the gradient, which overwrote the logits, in the dtype of the matrix products."""
        if self._logits_CV is self._product_CV:
            return gradient_CV
        return self._product_CV[: len(gradient_CV)].copy_(gradient_CV)


@cache
def _can_widen(kind: str, dtype: torch.dtype) -> bool:
    """Return whether a kind of device writes a product of this dtype in float32: torch 2.8 and later do with cuBLAS."""
    square, product = torch.ones((8, 8), dtype=dtype, device=kind), torch.empty((8, 8), device=kind)
    try:
        torch.ops.aten.mm.dtype_out(square, square, torch.float32, out=product)
    except (AttributeError, RuntimeError):  # NotImplementedError, a RuntimeError, on a CPU
        return False
    return True


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NM: Tensor, weight_VM: Tensor, has_target_N: Tensor, loss_and_gradient: LossAndGradient
    ) -> Tensor:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden_NM) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VM, dtype=torch.float32) if wants_weight else None
        loss = hidden_NM.new_zeros((), dtype=torch.float32)
        step = chunk_size(len(hidden_NM), hidden_NM.shape[1], len(weight_VM))
        logits = ChunkLogits(hidden_NM, weight_VM, step)
        with torch.autocast(hidden_NM.device.type, enabled=False):
            for start in range(0, len(hidden_NM), step):
                chunk = slice(start, start + step)
                logits_CV, has_target_C1 = logits.of(chunk), has_target_N[chunk, None]
                loss += (loss_and_gradient(chunk, logits_CV) * has_target_C1).sum()
                grad_CV = logits.in_matmul_dtype(logits_CV)
                if grad_hidden is not None:
                    grad_hidden[chunk] = (grad_CV @ logits.weight_VM) * has_target_C1
                if grad_weight is not None:
                    _add_product(grad_weight, grad_CV.T, logits.hidden_NM[chunk] * has_target_C1)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_VM.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = grad_outputs
        # autograd refuses a second backward pass, so what is saved may be overwritten.
        for gradient in (grad_hidden, grad_weight):
            if gradient is not None:
                _scale(gradient, scale)
        return grad_hidden, grad_weight, None, None


def _scale(gradient: Tensor, scale: Tensor) -> None:
    """Multiply in place, because new memory costs more than the product, by a float32 scale.

    The scale is not rounded to half precision: it depends on the number of processes, and the gradient must not.
    """
    if gradient.dtype == scale.dtype:
        gradient.mul_(scale)
        return
    for rows in torch.split(gradient, _SCALED_ROWS):
        rows.copy_(rows.to(scale.dtype).mul_(scale))


def _add_product(sum_VM: Tensor, grad_VC: Tensor, hidden_CM: Tensor) -> None:
    """Add grad · hidden to a float32 sum. A product in half precision is computed first, then added."""
    if grad_VC.dtype == torch.float32:
        sum_VM.addmm_(grad_VC, hidden_CM)
    else:
        sum_VM += grad_VC @ hidden_CM
