"""Compute the logits of a batch: of all tokens at once, or of a chunk at a time.

transformers models may scale, cap or bias their logits, so their own forward pass computes them, for all tokens at
once.

Letters: B windows, T tokens of each, N tokens of all, V vocabulary, M hidden size.
"""

from torch import Tensor

from model.decoder.chunk_size import chunk_size
from model.decoder.loading import LanguageModel
from model.decoder.losses import ChunkLogits
from model.decoder.transformers_model import TransformersModel
from uptrain.data.batch import Batch
from uptrain.data.default_sizes import default_micro_batch

_CPU_CHUNK_LOGITS = 1 << 22
"""Logits of a chunk, where they are computed without gradients on a CPU: few enough for its caches."""
_WHOLE_LOGITS = 1 << 28
"""Most logits of several windows, where they are computed at once: 1 GB in float32, and a few copies."""


class WholeLogits:
    """Computed logits with the interface of `ChunkLogits`."""

    def __init__(self, logits_NV: Tensor) -> None:
        self.logits_NV = logits_NV

    def of(self, chunk: slice) -> Tensor:
        return self.logits_NV[chunk]


def chunk_logits(
    model: LanguageModel, batch: Batch, max_tokens: int, wanted_N: Tensor | slice = slice(None)
) -> ChunkLogits | WholeLogits:  # fmt: skip
    """Return the float32 logits of each row's tokens except the last, to read in chunks of at most `max_tokens`.

    `wanted_N`: which of these tokens; a mask or a slice. Gradients do not flow through the logits of a chunk.
    """
    if isinstance(model, TransformersModel):
        return WholeLogits(whole_logits(model, batch)[wanted_N])
    return ChunkLogits(hidden_states(model, batch)[wanted_N], model.lm_head_weight, max_tokens)


def tokens_per_chunk(model: LanguageModel, n_tokens: int) -> int:
    """Return how many of `n_tokens` tokens a chunk has where its logits are computed without gradients, at least 1.

    A GPU, which reads the LM head's matrix once per chunk, takes the chunks of training.
    """
    vocab_size, hidden_size = model.lm_head_weight.shape
    if model.lm_head_weight.device.type == "cpu":
        return max(1, _CPU_CHUNK_LOGITS // vocab_size)
    return chunk_size(n_tokens, hidden_size, vocab_size)


def micro_batch_without_gradients(model: LanguageModel, seq_len: int) -> int:
    """Return the default number of windows in a micro-batch without gradients.

    It is smaller for transformers' classes with large vocabularies, which compute all its logits at once.
    """
    n = default_micro_batch(seq_len)
    if isinstance(model, TransformersModel):
        return min(n, max(1, _WHOLE_LOGITS // (seq_len * len(model.lm_head_weight))))
    return n


def hidden_states(model: LanguageModel, batch: Batch) -> Tensor:
    """Return the hidden states of each row's tokens except the last, [N, M]."""
    return model.hidden(batch.ids_BT, batch.documents_BT)[:, :-1].flatten(0, 1)


def whole_logits(model: LanguageModel, batch: Batch) -> Tensor:
    """Return the float32 logits of each row's tokens except the last, [N, V]."""
    logits_BTV = model(batch.ids_BT, None, batch.documents_BT)
    assert isinstance(logits_BTV, Tensor)
    return logits_BTV[:, :-1].flatten(0, 1)
