"""Compute evaluation metrics as sums per batch: losses, divergence from the teacher, agreement with the teacher.

Letters: N tokens, C tokens of a chunk, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.devices import float64_device, to_float64
from model.decoder.loading import LanguageModel
from uptrain.data.batch import Batch
from uptrain.training.logits import chunk_logits, tokens_per_chunk

N_SUMS = 5
"""Number of sums that `measure_batch` returns."""


@dataclass(frozen=True)
class EvalResult:
    """Means per target over the held-out data."""

    targets: int
    loss: float
    """Cross-entropy, in nats."""
    teacher_loss: float | None = None
    kl: float | None = None
    """KL(teacher ‖ student), in nats; 0 means complete recovery."""
    agreement: float | None = None
    """Fraction of targets where teacher and student predict the same token."""

    def to_dict(self) -> dict[str, float]:
        """Return the values by name, without those that need a teacher if there was none."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_sums(cls, sums: Tensor, with_teacher: bool) -> "EvalResult":
        """Return means from the total of the sums that `measure_batch` returns."""
        targets, *totals = sums.tolist()
        loss, *of_teacher = (total / max(targets, 1) for total in totals)
        return cls(int(targets), loss, *of_teacher) if with_teacher else cls(int(targets), loss)


def measure_batch(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return the sums [targets, loss, teacher's loss, KL, agreements] of a batch, in float64."""
    has_target_N = batch.has_target_N
    targets_N = batch.targets_N[has_target_N]
    sums = torch.zeros(N_SUMS, dtype=torch.float64, device=float64_device(targets_N.device))
    sums[0] = len(targets_N)
    step = tokens_per_chunk(student, len(targets_N))
    student_NV = chunk_logits(student, batch, step, has_target_N)
    teacher_NV = None if teacher is None else chunk_logits(teacher, batch, step, has_target_N)
    for start in range(0, len(targets_N), step):
        chunk = slice(start, start + step)
        log_student_CV = student_NV.of(chunk).log_softmax(dim=1)
        sums[1] += to_float64(F.nll_loss(log_student_CV, targets_N[chunk], reduction="none")).sum()
        if teacher_NV is not None:
            log_teacher_CV = teacher_NV.of(chunk).log_softmax(dim=1)
            sums[2] += to_float64(F.nll_loss(log_teacher_CV, targets_N[chunk], reduction="none")).sum()
            sums[3] += to_float64((log_teacher_CV.exp() * (log_teacher_CV - log_student_CV)).sum(dim=1)).sum()
            sums[4] += (log_teacher_CV.argmax(dim=1) == log_student_CV.argmax(dim=1)).sum().to(sums.device)
    return sums
