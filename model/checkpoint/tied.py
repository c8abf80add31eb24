"""Output heads that are the embedding.

Where `config.json` ties the two, a safetensors folder has the embedding only, but formats that save a module's state
dict as it stands have both.
"""

import numpy as np

from model.checkpoint.interface import Checkpoint
from model.checkpoint.tensor import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What may be equal, as the families call it.
NAMES = (
    (EMBEDDING, HEAD),
    ("gpt_neox.embed_in.weight", "embed_out.weight"),
    ("transformer.word_embeddings.weight", "lm_head.weight"),
    ("shared.weight", "lm_head.weight"),
    ("shared.weight", "encoder.embed_tokens.weight"),
    ("shared.weight", "decoder.embed_tokens.weight"),
)
EMBEDDINGS = tuple(dict.fromkeys(embedding for embedding, _ in NAMES))
_PIECE = 8 << 20


def without_tied_head(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's tensors without the head, if its config ties it and it is the embedding, byte for byte.

    A head that differs stays: the model may have been trained so, and transformers then does not tie either.
    """
    if checkpoint.config.get("tie_word_embeddings") is not True:
        return checkpoint.tensors
    tied = {head for embedding, head in NAMES if _are_equal(checkpoint, embedding, head)}
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name not in tied}


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    one, other = checkpoint.tensors.get(first), checkpoint.tensors.get(second)
    if not one or not other or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if checkpoint.span(first) is not None and checkpoint.span(first) == checkpoint.span(second):
        return True
    return all(
        np.ascontiguousarray(checkpoint.rows(first, start, stop)).tobytes()
        == np.ascontiguousarray(checkpoint.rows(second, start, stop)).tobytes()
        for start, stop in one.row_blocks(_PIECE)
    )
