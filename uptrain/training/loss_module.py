"""Wrap the student and its loss in one module, so that DDP and FSDP see one forward pass.

Within this forward pass the LM head's matrix is unsharded, also under FSDP.
"""

import torch
from torch import Tensor, nn

from model.decoder.loading import LanguageModel
from uptrain.data.batch import Batch, TopK
from uptrain.training.losses import find_loss

STUDENT = "student."
"""Prefix of the model's tensor names in a training checkpoint."""


class LossModule(nn.Module):
    """Return the loss summed over a batch's targets, or the sums of `measure_batch` with `measure`."""

    def __init__(self, student: LanguageModel, loss: str, teacher: LanguageModel | None) -> None:
        super().__init__()
        self.student = student
        self._loss_sum = find_loss(loss)
        self._teacher = (teacher,)  # a tuple keeps it from being a submodule, which would be trained, wrapped and saved

    @property
    def teacher(self) -> LanguageModel | None:
        return self._teacher[0]

    def forward(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        documents_BT: Tensor,
        measure: bool = False,
        top: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`top`: from `TopK.as_inputs`. (DDP and FSDP take tensors and tuples of them, but no dataclasses.)"""
        batch = Batch(ids_BT, labels_BT, documents_BT, TopK.from_inputs(*top) if top else None)
        if measure:
            from uptrain.training.eval_metrics import measure_batch

            with torch.no_grad():
                return measure_batch(self.student, self.teacher, batch)
        return self._loss_sum(self.student, self.teacher, batch)
