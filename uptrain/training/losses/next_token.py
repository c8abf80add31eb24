"""Compute the cross-entropy of the next token: the loss of pre-training, and of the GQA paper."""

from torch import Tensor

from model.decoder.loading import LanguageModel
from uptrain.data.batch import Batch


def loss_sum(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return Σ −log p(next token), in nats."""
    loss, _ = student(batch.ids_BT, batch.labels_BT, batch.documents_BT)
    assert isinstance(loss, Tensor)
    return loss
