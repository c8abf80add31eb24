"""Cross-entropy of the next token: the pre-training loss, and the paper's."""

from torch import Tensor

from uptrain.data.batch import Batch
from uptrain.training.language_model import LanguageModel


def loss_sum(student: LanguageModel, teacher: LanguageModel | None, batch: Batch) -> Tensor:
    """Return Σ −log p(next token), in nats."""
    loss, _ = student(batch.ids_BT, batch.labels_BT, batch.documents_BT)
    assert isinstance(loss, Tensor)
    return loss
