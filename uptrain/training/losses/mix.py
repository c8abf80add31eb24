"""Compute the mean of next-token cross-entropy and distillation loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.losses import IGNORED, chunked_cross_entropy
from model.decoder.transformers_model import TransformersModel
from uptrain.data.batch import Batch
from uptrain.training.kl import chunked_kl, hidden_states, whole_kl, whole_logits
from uptrain.training.language_model import LanguageModel
from uptrain.training.top_k_kl import chunked_top_k_kl, whole_top_k_kl


def loss_sum(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return Σ (−log p(next token) + KL(teacher ‖ student)) / 2, in nats, from one forward pass of the student."""
    targets_N = batch.labels_BT[:, 1:].flatten()
    has_target_N = targets_N != IGNORED
    if isinstance(student, TransformersModel) or isinstance(teacher, TransformersModel):
        logits_NV = whole_logits(student, batch)
        next_token = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
        if teacher is None:
            return (next_token + whole_top_k_kl(logits_NV, batch, has_target_N)) / 2
        return (next_token + whole_kl(logits_NV, teacher, batch, has_target_N)) / 2
    teacher_NM = None
    if teacher is not None:
        with torch.no_grad():
            teacher_NM = hidden_states(teacher, batch)
    student_NM = hidden_states(student, batch)
    next_token, _ = chunked_cross_entropy(student_NM, student.head_weight, targets_N)
    if teacher is None or teacher_NM is None:
        kl = chunked_top_k_kl(student_NM, student.head_weight, batch, has_target_N)
    else:
        kl = chunked_kl(student_NM, student.head_weight, teacher_NM, teacher.head_weight, has_target_N)
    return (next_token + kl) / 2
