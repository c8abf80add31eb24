"""Compute the distillation loss: KL(teacher ‖ student) of the next-token distributions."""

import torch
from torch import Tensor

from model.decoder.chunk_size import chunk_size
from model.decoder.loading import LanguageModel
from model.decoder.losses import LossAndGradient, chunked_loss
from model.decoder.transformers_model import TransformersModel
from uptrain.data.batch import Batch
from uptrain.training.logits import hidden_states, whole_logits
from uptrain.training.losses.kl import kl_of_chunks, whole_kl
from uptrain.training.losses.top_k_kl import top_k_kl_of_chunks, whole_top_k_kl


def loss_sum(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return Σ KL(teacher ‖ student) over the targets, in nats. Without a teacher, `batch.top` holds its logits."""
    if needs_whole_logits(student, teacher):
        return kl_of_logits(whole_logits(student, batch), teacher, batch)
    student_NM, kl = run_models(student, teacher, batch)
    return chunked_loss(student_NM, student.lm_head_weight, batch.has_target_N, kl)


def needs_whole_logits(student: LanguageModel, teacher: LanguageModel | None) -> bool:
    """Return whether logits are there for all tokens at once, since a class of transformers computes them."""
    return isinstance(student, TransformersModel) or isinstance(teacher, TransformersModel)


def kl_of_logits(student_NV: Tensor, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return the divergence of computed student logits, [N, V]."""
    if teacher is None:
        return whole_top_k_kl(student_NV, batch, batch.has_target_N)
    return whole_kl(student_NV, teacher, batch, batch.has_target_N)


def run_models(
    student: LanguageModel, teacher: LanguageModel | None, batch: Batch
) -> tuple[Tensor, LossAndGradient]:  # fmt: skip
    """Run both models; return the student's hidden states, [N, M], and the divergence of a chunk of its logits."""
    if teacher is None:
        return hidden_states(student, batch), top_k_kl_of_chunks(batch)
    with torch.no_grad():
        teacher_NM = hidden_states(teacher, batch)
    student_NM = hidden_states(student, batch)
    size = chunk_size(len(student_NM), student_NM.shape[1], len(student.lm_head_weight))
    return student_NM, kl_of_chunks(teacher_NM, teacher.lm_head_weight, size)
