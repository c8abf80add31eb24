"""Distillation: the forward KL divergence from the teacher's distribution of the next token to the student's.

At temperature 1 and over the whole vocabulary (Hinton et al. 2015; the top k alone would be a biased teacher, Anshumann
et al. 2025). Like `model.loss`, it never holds all logits: a chunk of tokens at a time, gradients at once.

Letters: N tokens, C tokens of a chunk, V vocabulary, M hidden size (the teacher's may differ).
"""

from typing import Any

import torch
from torch import Tensor

from model.loss import IGNORED
from uptrain.data.batch import Batch
from uptrain.language_model import LanguageModel

_CHUNK_LOGITS = 1 << 22
"""Logits held at a time, of each model."""


def loss_sum(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return Σ KL(teacher ‖ student) over the targets, in nats."""
    assert teacher is not None
    with torch.no_grad():
        teacher_NM = teacher.hidden(batch.ids_BT, batch.documents_BT)[:, :-1].flatten(0, 1)
    student_NM = student.hidden(batch.ids_BT, batch.documents_BT)[:, :-1].flatten(0, 1)
    counts_N = batch.labels_BT[:, 1:].flatten() != IGNORED
    return chunked_kl(student_NM, student.head_weight, teacher_NM, teacher.head_weight.detach(), counts_N)


def chunked_kl(
    student_NM: Tensor, weight_VM: Tensor, teacher_NM: Tensor, teacher_weight_VM: Tensor, counts_N: Tensor
) -> Tensor:
    """Return Σ Σ_v p_teacher (log p_teacher − log p_student) in float32, over the tokens where `counts_N`.

    p = softmax(hidden · weightᵀ). Gradients flow to the student only.
    """
    loss: Tensor = _ChunkedKL.apply(student_NM, weight_VM, teacher_NM, teacher_weight_VM, counts_N)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student_NM: Tensor, weight_VM: Tensor, teacher_NM: Tensor, teacher_weight_VM: Tensor, counts_N: Tensor
    ) -> Tensor:
        device = student_NM.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else student_NM.dtype
        grad_student = torch.empty_like(student_NM)
        grad_weight = torch.zeros_like(weight_VM, dtype=torch.float32)
        loss = torch.zeros((), dtype=torch.float32, device=student_NM.device)
        with torch.autocast(device, enabled=False):
            tensors = (student_NM, weight_VM, teacher_NM, teacher_weight_VM)
            student, weight, taught, teacher_weight = (x.to(dtype) for x in tensors)
            step = max(1, _CHUNK_LOGITS // len(weight))
            for start in range(0, len(student), step):
                chunk = slice(start, start + step)
                counts_C1 = counts_N[chunk, None]
                log_student_CV = (student[chunk] @ weight.T).float().log_softmax(dim=1)
                log_teacher_CV = (taught[chunk] @ teacher_weight.T).float().log_softmax(dim=1)
                p_teacher_CV = log_teacher_CV.exp()
                loss += (p_teacher_CV * (log_teacher_CV - log_student_CV) * counts_C1).sum()
                grad_CV = (log_student_CV.exp_().sub_(p_teacher_CV) * counts_C1).to(dtype)
                grad_student[chunk] = grad_CV @ weight
                grad_weight += grad_CV.T @ student[chunk]
        ctx.save_for_backward(grad_student, grad_weight.to(weight_VM.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_student, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        needs_student, needs_weight, *_ = ctx.needs_input_grad
        return (
            grad_student * scale.to(grad_student.dtype) if needs_student else None,
            grad_weight * scale.to(grad_weight.dtype) if needs_weight else None,
            None,
            None,
            None,
        )
