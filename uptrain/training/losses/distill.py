"""Compute the distillation loss: KL(teacher ‖ student) of the next-token distributions."""

import torch
from torch import Tensor

from model.decoder.losses import IGNORED
from model.decoder.transformers_model import TransformersModel
from uptrain.data.batch import Batch
from uptrain.training.kl import chunked_kl, hidden_states, whole_kl, whole_logits
from uptrain.training.language_model import LanguageModel
from uptrain.training.top_k_kl import chunked_top_k_kl, whole_top_k_kl


def loss_sum(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return Σ KL(teacher ‖ student) over the targets, in nats. Without a teacher, `batch.top` holds its logits."""
    has_target_N = batch.labels_BT[:, 1:].flatten() != IGNORED
    if isinstance(student, TransformersModel) or isinstance(teacher, TransformersModel):
        logits_NV = whole_logits(student, batch)
        if teacher is None:
            return whole_top_k_kl(logits_NV, batch, has_target_N)
        return whole_kl(logits_NV, teacher, batch, has_target_N)
    if teacher is None:
        return chunked_top_k_kl(hidden_states(student, batch), student.head_weight, batch, has_target_N)
    with torch.no_grad():
        teacher_NM = hidden_states(teacher, batch)
    return chunked_kl(hidden_states(student, batch), student.head_weight, teacher_NM, teacher.head_weight, has_target_N)
