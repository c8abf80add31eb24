"""Compute the mean of next-token cross-entropy and distillation loss."""

import torch.nn.functional as F
from torch import Tensor

from model.decoder.loading import LanguageModel
from model.decoder.losses import IGNORED, LossAndGradient, chunked_loss, cross_entropy_of_chunks
from uptrain.data.batch import Batch
from uptrain.training.logits import whole_logits
from uptrain.training.losses.distill import kl_of_logits, needs_whole_logits, run_models


def loss_sum(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return Σ (−log p(next token) + KL(teacher ‖ student)) / 2, in nats, from one forward pass of the student."""
    if needs_whole_logits(student, teacher):
        logits_NV = whole_logits(student, batch)
        next_token = F.cross_entropy(logits_NV, batch.targets_N, ignore_index=IGNORED, reduction="sum")
        return (next_token + kl_of_logits(logits_NV, teacher, batch)) / 2
    student_NM, kl = run_models(student, teacher, batch)
    both = _mean(cross_entropy_of_chunks(batch.targets_N), kl)
    return chunked_loss(student_NM, student.lm_head_weight, batch.has_target_N, both)


def _mean(first: LossAndGradient, second: LossAndGradient) -> LossAndGradient:
    """Return the mean of two losses of the same logits. One gradient of these leads to one of LM head and states."""

    def loss_and_gradient(chunk: slice, logits_CV: Tensor) -> Tensor:
        copy_CV = logits_CV.clone()
        losses_C1 = first(chunk, copy_CV) + second(chunk, logits_CV)
        logits_CV.add_(copy_CV).mul_(0.5)
        return losses_C1 / 2

    return loss_and_gradient
