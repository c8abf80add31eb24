"""Compute KL(teacher ‖ student) from the teacher's top k log-probabilities and the mass of the rest, as one category.

Σ over the top k of p (log p − log q), and p_rest (log p_rest − log q_rest): the KL divergence of the distributions in
which all other tokens are lumped. It is at most the full divergence (by the log-sum inequality), and equal to it if k
is the vocabulary. The gradient leaves the proportions of the rest as the student has them.

Letters: N tokens, C tokens of a chunk, K = k, L = K + 1, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.decoder.losses import LossAndGradient
from uptrain.data.batch import Batch, TopK

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class _Target:
    """The teacher's values of a batch by token: [N, K + 1] and [N, K]."""

    values_NL: Tensor
    ids_NK: Tensor

    @classmethod
    def of(cls, top: TopK) -> "_Target":
        return cls(top.values_BTL.flatten(0, 1), top.ids_BTK.flatten(0, 1))

    def loss_and_gradient(self, chunk: slice, logits_CV: Tensor) -> Tensor:
        """Return the divergences, and overwrite the student's logits with their gradient."""
        log_p_CL, ids_CK = self.values_NL[chunk], self.ids_NK[chunk]
        log_p_CK, log_rest_C1 = log_p_CL[:, :-1], log_p_CL[:, -1:]
        p_CK, rest_C1 = log_p_CK.exp(), log_rest_C1.exp()
        logits_CV.sub_(logits_CV.amax(dim=1, keepdim=True))
        top_CK = logits_CV.gather(1, ids_CK)
        logits_CV.exp_()
        weights_CK = logits_CV.gather(1, ids_CK)
        # The sum of the rest alone: the difference of two sums would lose its digits.
        student_rest_C1 = logits_CV.scatter_(1, ids_CK, 0.0).sum(dim=1, keepdim=True)
        sum_C1 = student_rest_C1 + weights_CK.sum(dim=1, keepdim=True)
        student_rest_C1.clamp_(min=_TINY)
        of_top_C1 = (p_CK * (log_p_CK - top_CK + sum_C1.log())).sum(dim=1, keepdim=True)
        of_rest_C1 = rest_C1 * (log_rest_C1 - student_rest_C1.log() + sum_C1.log())
        logits_CV.mul_(1 / sum_C1 - rest_C1 / student_rest_C1)
        logits_CV.scatter_(1, ids_CK, weights_CK / sum_C1 - p_CK)
        return of_top_C1 + torch.where(rest_C1 > 0, of_rest_C1, 0.0)


def top_k_kl_of_chunks(batch: Batch) -> LossAndGradient:
    """Return the divergence for `model.decoder.losses.chunked_loss`."""
    assert batch.top is not None
    return _Target.of(batch.top).loss_and_gradient


def whole_top_k_kl(student_NV: Tensor, batch: Batch, has_target_N: Tensor) -> Tensor:
    """Return the divergence for computed student logits, [N, V]; gradients flow to them."""
    assert batch.top is not None
    target = _Target.of(batch.top)
    loss: Tensor = _LossOfLogits.apply(student_NV, has_target_N, target.loss_and_gradient)  # type: ignore[no-untyped-call]
    return loss


class _LossOfLogits(torch.autograd.Function):
    """The sum of a loss over computed logits, whose gradient is known when the loss is."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, has_target_N: Tensor, loss_and_gradient: LossAndGradient) -> Tensor:
        gradient_NV = logits_NV.float().clone()
        losses_N1 = loss_and_gradient(slice(None), gradient_NV)
        ctx.save_for_backward(gradient_NV.mul_(has_target_N[:, None]))
        return (losses_N1 * has_target_N[:, None]).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV * grad_outputs[0], None, None
