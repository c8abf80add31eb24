"""What evaluation measures, batch by batch, as sums: losses, divergence from the teacher, agreement with it.

Letters: N tokens, V vocabulary, M hidden size.
"""

import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.llama import LlamaForCausalLM
from model.decoder.losses import IGNORED, ChunkLogits
from uptrain.data.batch import Batch
from uptrain.training.language_model import LanguageModel

LARGEST = math.log(sys.float_info.max)
_CHUNK_LOGITS = 1 << 22
"""Made at a time, of each model."""


@dataclass(frozen=True)
class EvalResult:
    """Means per target over a held-out text."""

    targets: int
    loss: float
    """Cross-entropy, in nats."""
    teacher_loss: float | None = None
    kl: float | None = None
    """KL(teacher ‖ student), in nats; 0 is complete recovery."""
    agreement: float | None = None
    """Share of targets where teacher and student would choose the same token."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < LARGEST else math.inf

    @classmethod
    def from_sums(cls, sums: Tensor, with_teacher: bool) -> "EvalResult":
        """Make means of what `measure_batch` returned, added up."""
        targets, loss, teacher_loss, kl, agreed = sums.tolist()
        means = (x / max(targets, 1) for x in (loss, teacher_loss, kl, agreed))
        loss, *rest = means
        return cls(int(targets), loss, *rest) if with_teacher else cls(int(targets), loss)


def measure_batch(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return the sums [targets, loss, teacher's loss, KL, agreements] of a batch, in float64."""
    targets_N = batch.labels_BT[:, 1:].flatten()
    kept_N = targets_N != IGNORED
    targets_N = targets_N[kept_N]
    sums = torch.zeros(5, dtype=torch.float64, device=targets_N.device)
    sums[0] = len(targets_N)
    step = max(1, _CHUNK_LOGITS // len(student.head_weight))
    student_NV = _logits(student, batch, kept_N, step)
    teacher_NV = None if teacher is None else _logits(teacher, batch, kept_N, step)
    for start in range(0, len(targets_N), step):
        chunk = slice(start, start + step)
        p_CV = student_NV.of(chunk).log_softmax(dim=1)
        sums[1] += F.nll_loss(p_CV, targets_N[chunk], reduction="none").double().sum()
        if teacher_NV is not None:
            q_CV = teacher_NV.of(chunk).log_softmax(dim=1)
            sums[2] += F.nll_loss(q_CV, targets_N[chunk], reduction="none").double().sum()
            sums[3] += (q_CV.exp() * (q_CV - p_CV)).sum(dim=1).double().sum()
            sums[4] += (q_CV.argmax(dim=1) == p_CV.argmax(dim=1)).sum()
    return sums


class _GivenLogits:
    """Logits that are there already, as `ChunkLogits`."""

    def __init__(self, logits_NV: Tensor) -> None:
        self.logits_NV = logits_NV

    def of(self, chunk: slice) -> Tensor:
        return self.logits_NV[chunk].float()


def _logits(model: LanguageModel, batch: Batch, kept_N: Tensor, chunk_size: int) -> ChunkLogits | _GivenLogits:
    """Families of transformers may scale or cap their logits, so theirs come from their own forward."""
    if isinstance(model, LlamaForCausalLM):
        states_BTM = model.hidden(batch.ids_BT, batch.documents_BT)
        return ChunkLogits(states_BTM[:, :-1].flatten(0, 1)[kept_N], model.head_weight, chunk_size)
    logits_BTV = model(batch.ids_BT, None, batch.documents_BT)
    return _GivenLogits(logits_BTV[:, :-1].flatten(0, 1)[kept_N])
