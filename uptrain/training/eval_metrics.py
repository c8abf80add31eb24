"""Compute evaluation metrics as sums per batch: losses, divergence from the teacher, agreement with the teacher.

Of each window, `measure_batch` has the totals named in TOTALS. It sums the products of each two of them over windows.
These sums have a fixed size, and give means and standard errors.

Letters: B windows, T tokens of a row, N tokens, C tokens of a chunk, V vocabulary, S totals of a window.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.devices import float64_device, to_float64
from model.decoder.loading import LanguageModel
from uptrain.data.batch import Batch
from uptrain.training.logits import chunk_logits, tokens_per_chunk

TOTALS = ("windows", "targets", "loss", "above_teacher", "teacher_loss", "kl", "agreement")
"""Totals of a window. `windows` is 1, or 0 if the window has no targets; `above_teacher` is `loss` − `teacher_loss`."""
_WINDOWS, _TARGETS, _LOSS, _ABOVE_TEACHER, _TEACHER_LOSS, _KL, _AGREEMENT = range(len(TOTALS))


@dataclass(frozen=True)
class EvalResult:
    """Means per target over the held-out data, and their standard errors.

    The errors are None for a single window. They take windows as independent samples. Neighbouring windows are often of
    the same document, so the true errors are larger.
    """

    targets: int
    loss: float
    """Cross-entropy, in nats."""
    loss_error: float | None
    teacher_loss: float | None = None
    above_teacher_error: float | None = None
    """Standard error of `loss` − `teacher_loss`, from the differences within windows."""
    kl: float | None = None
    """KL(teacher ‖ student), in nats; 0 means complete recovery."""
    kl_error: float | None = None
    agreement: float | None = None
    """Fraction of targets where teacher and student predict the same token."""

    def to_dict(self) -> dict[str, float | None]:
        """Return the values by name, without those that need a teacher if there was none."""
        if self.teacher_loss is None:
            return {"targets": self.targets, "loss": self.loss, "loss_error": self.loss_error}
        return dict(vars(self))

    @classmethod
    def from_sums(cls, sums_SS: Tensor, with_teacher: bool) -> "EvalResult":
        """Return means and errors from the total of the sums that `measure_batch` returns."""
        targets = sums_SS[_WINDOWS, _TARGETS].item()
        means = (sums_SS[_WINDOWS] / max(targets, 1)).tolist()
        result = cls(int(targets), means[_LOSS], _standard_error(sums_SS, _LOSS))
        if not with_teacher:
            return result
        return replace(
            result,
            teacher_loss=means[_TEACHER_LOSS],
            above_teacher_error=_standard_error(sums_SS, _ABOVE_TEACHER),
            kl=means[_KL],
            kl_error=_standard_error(sums_SS, _KL),
            agreement=means[_AGREEMENT],
        )


def _standard_error(sums_SS: Tensor, total: int) -> float | None:
    """Return the standard error of a total divided by the targets, or None for fewer than two windows.

    The windows are the samples. The mean m = ΣX / ΣT of totals X and targets T is a ratio of sums, whose error is, by
    linearisation, √(n / (n − 1) · Σ(X − m T)²) / ΣT (Cochran, Sampling Techniques, 1977, chapter 6).
    """
    n, targets = sums_SS[_WINDOWS, _WINDOWS].item(), sums_SS[_WINDOWS, _TARGETS]
    if n < 2:
        return None
    mean = sums_SS[_WINDOWS, total] / targets
    squares = sums_SS[total, total] - 2 * mean * sums_SS[total, _TARGETS] + mean**2 * sums_SS[_TARGETS, _TARGETS]
    return float((n / (n - 1) * squares.clamp(min=0)).sqrt() / targets)  # rounding may make the squares negative


def measure_batch(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return the sums over a batch's windows of the products of each two TOTALS, [S, S] in float64.

    The products with `windows`, the first row, are the sums of the totals themselves.
    """
    has_target_N = batch.has_target_N
    targets_N = batch.targets_N[has_target_N]
    device = float64_device(targets_N.device)
    values_SN = torch.zeros(len(TOTALS), len(targets_N), dtype=torch.float64, device=device)
    values_SN[_TARGETS] = 1
    step = tokens_per_chunk(student, len(targets_N))
    student_NV = chunk_logits(student, batch, step, has_target_N)
    teacher_NV = None if teacher is None else chunk_logits(teacher, batch, step, has_target_N)
    for start in range(0, len(targets_N), step):
        chunk = slice(start, start + step)
        log_student_CV = student_NV.of(chunk).log_softmax(dim=1)
        values_SN[_LOSS, chunk] = to_float64(F.nll_loss(log_student_CV, targets_N[chunk], reduction="none"))
        if teacher_NV is not None:
            log_teacher_CV = teacher_NV.of(chunk).log_softmax(dim=1)
            values_SN[_TEACHER_LOSS, chunk] = to_float64(F.nll_loss(log_teacher_CV, targets_N[chunk], reduction="none"))
            kl_C = (log_teacher_CV.exp() * (log_teacher_CV - log_student_CV)).sum(dim=1)
            values_SN[_KL, chunk] = to_float64(kl_C)
            values_SN[_AGREEMENT, chunk] = to_float64(log_teacher_CV.argmax(dim=1) == log_student_CV.argmax(dim=1))
    values_SN[_ABOVE_TEACHER] = values_SN[_LOSS] - values_SN[_TEACHER_LOSS]
    return _sum_products(values_SN, has_target_N.to(device).view(len(batch.ids_BT), -1))


def _sum_products(values_SN: Tensor, has_target_BT: Tensor) -> Tensor:
    """Return the sums over windows of the products of each two totals, from the values of their targets."""
    values_SBT = values_SN.new_zeros(len(values_SN), *has_target_BT.shape)
    values_SBT[:, has_target_BT] = values_SN
    totals_SB = values_SBT.sum(dim=2)
    totals_SB[_WINDOWS] = totals_SB[_TARGETS] > 0
    return totals_SB @ totals_SB.T
