"""Cross-entropy of the next token. Letters as in `model.decoder.chunked_loss`."""

from torch import Tensor

from model.decoder.chunked_loss import chunked_loss

IGNORED = -100


def chunked_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of −log softmax(hidden · weightᵀ)[label] in float32, and the number of labels that count.

    Labels of −100 count for nothing.
    """
    counts_N = labels_N != IGNORED
    labels_N1 = labels_N.clamp(min=0)[:, None]
    loss_sum = chunked_loss(hidden_ND, weight_VD, counts_N, lambda chunk, logits: _rule(labels_N1[chunk], logits))
    return loss_sum, counts_N.sum()


def _rule(labels_C1: Tensor, logits_CV: Tensor) -> Tensor:
    """Return the losses, and make of the logits softmax − one-hot."""
    chosen_C1, peak_C1 = logits_CV.gather(1, labels_C1), logits_CV.amax(dim=1, keepdim=True)
    sum_C1 = logits_CV.sub_(peak_C1).exp_().sum(dim=1, keepdim=True)
    logits_CV.div_(sum_C1)
    logits_CV.scatter_add_(1, labels_C1, logits_CV.new_full(labels_C1.shape, -1.0))
    return sum_C1.log() + peak_C1 - chosen_C1
