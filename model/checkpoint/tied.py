"""Output heads that are the embedding.

Where `config.json` ties the two, a safetensors folder has the embedding only, but formats that save a module's state
dict as it stands have both.
"""

import numpy as np

from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.tensor import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PIECE = 8 << 20


def without_tied_head(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a checkpoint's tensors without the head, if its config ties it and it is the embedding, byte for byte.

    A head that differs stays: the model may have been trained so, and transformers then does not tie either.
    """
    tensors = checkpoint.tensors
    if checkpoint.config.get("tie_word_embeddings") is not True or not _are_equal(checkpoint):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


def _are_equal(checkpoint: Checkpoint) -> bool:
    embedding, head = checkpoint.tensors.get(EMBEDDING), checkpoint.tensors.get(HEAD)
    if not embedding or not head or (embedding.dtype, embedding.shape) != (head.dtype, head.shape):
        return False
    if checkpoint.span(EMBEDDING) is not None and checkpoint.span(EMBEDDING) == checkpoint.span(HEAD):
        return True
    return all(
        np.ascontiguousarray(checkpoint.rows(EMBEDDING, start, stop)).tobytes()
        == np.ascontiguousarray(checkpoint.rows(HEAD, start, stop)).tobytes()
        for start, stop in embedding.row_blocks(_PIECE)
    )
