"""Compute KL(teacher ‖ student) of the next-token distributions, from a teacher that runs beside the student.

The temperature is 1, and the sum runs over the whole vocabulary (Hinton et al. 2015): the top k alone would give a
biased teacher (Anshumann et al. 2025). Logits are computed chunk by chunk (`model.decoder.losses`), but those of
transformers models for all tokens at once (`uptrain.training.logits`).

Letters: N tokens, C tokens of a chunk, V vocabulary, M hidden size (the teacher's may differ).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.loading import LanguageModel
from model.decoder.losses import ChunkLogits, LossAndGradient
from uptrain.data.batch import Batch
from uptrain.training.logits import whole_logits


def kl_of_chunks(teacher_NM: Tensor, teacher_weight_VM: Tensor, size: int) -> LossAndGradient:
    """Return the divergence for `chunked_loss`, of chunks of `size` tokens."""
    teacher_logits = ChunkLogits(teacher_NM, teacher_weight_VM, size)
    return lambda chunk, logits_CV: _loss_and_grad(teacher_logits.of(chunk), logits_CV)


def whole_kl(student_NV: Tensor, teacher: LanguageModel, batch: Batch, has_target_N: Tensor) -> Tensor:
    """Return the divergence for computed student logits, [N, V]; gradients flow to them."""
    with torch.no_grad():
        log_p_NV = whole_logits(teacher, batch)[has_target_N].log_softmax(dim=1)
    log_q_NV = student_NV[has_target_N].log_softmax(dim=1)
    return F.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True)


def _loss_and_grad(teacher_CV: Tensor, student_CV: Tensor) -> Tensor:
    """Return the divergences, and overwrite the student's logits with their gradient, p_student − p_teacher."""
    for logits_CV in (teacher_CV, student_CV):
        logits_CV.sub_(logits_CV.amax(dim=1, keepdim=True))
    ratio_CV = teacher_CV - student_CV
    teacher_sum_C1, student_sum_C1 = (x.exp_().sum(dim=1, keepdim=True) for x in (teacher_CV, student_CV))
    p_teacher_CV = teacher_CV.div_(teacher_sum_C1)
    student_CV.div_(student_sum_C1).sub_(p_teacher_CV)
    mean_ratio_C1: Tensor = torch.linalg.vecdot(p_teacher_CV, ratio_CV)[:, None]
    return mean_ratio_C1 - teacher_sum_C1.log() + student_sum_C1.log()
