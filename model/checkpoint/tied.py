"""Drop LM heads that equal the embedding, and give GPT-NeoX's the name that its files have.

If `config.json` ties the two, a safetensors folder holds only the embedding. Formats that save a module's state dict
hold both.
"""

from model.checkpoint.interface import Checkpoint
from model.checkpoint.same_bytes import same_bytes
from model.checkpoint.tensor import TensorInfo
from model.checkpoint.view import RenamedTensors
from model.common.errors import CheckpointError

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
NEOX_LM_HEAD = "embed_out.weight"
"""The LM head in the files of GPT-NeoX. transformers 5 calls it `lm_head` in memory, so state dicts that were saved
there hold that name."""
SHARED, COPIES_OF_SHARED = "shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""The embedding of a T5, and other names of the same tensor."""
TIED_PAIRS = (
    (EMBEDDING, LM_HEAD),
    ("gpt_neox.embed_in.weight", NEOX_LM_HEAD),
    ("gpt_neox.embed_in.weight", LM_HEAD),
    ("transformer.word_embeddings.weight", LM_HEAD),
    (SHARED, LM_HEAD),
    *((SHARED, copy) for copy in COPIES_OF_SHARED),
)
"""The pairs of tensors that may be equal, in the names of all families."""
EMBEDDINGS = tuple(dict.fromkeys(embedding for embedding, _ in TIED_PAIRS))
TIED_BY_DEFAULT = (
    "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3_text", "mpt", "mt5", "smollm3", "starcoder2",
    "t5", "t5_gqa",
)  # fmt: skip
"""The families whose class ties the two if the config does not have `tie_word_embeddings`."""


def without_tied_lm_head(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors without the LM head, if the config ties it and its bytes equal the embedding's.

    An LM head that differs is kept: the model may have been trained so. transformers 5 then uses both, and version 4
    the embedding.
    """
    is_tied = checkpoint.config.get("tie_word_embeddings", checkpoint.config.get("model_type") in TIED_BY_DEFAULT)
    if is_tied is not True:
        return checkpoint.tensors
    tied = {copy for embedding, copy in TIED_PAIRS if _are_equal(checkpoint, embedding, copy)}
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name not in tied}


def with_stored_lm_head(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose LM head has the name that GPT-NeoX's files have, if it is one.

    Other programs, and the code for fewer K/V heads, would not find it under its name in memory. Raises
    CheckpointError if both are there.
    """
    is_neox = checkpoint.config.get("model_type") in ("gpt_neox", "gpt_neox_gqa")
    if not is_neox or LM_HEAD not in checkpoint.tensors:
        return checkpoint
    if NEOX_LM_HEAD in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.path} holds both {NEOX_LM_HEAD} and {LM_HEAD}, two names of one tensor; remove one of them."
        )
    return RenamedTensors(checkpoint, {LM_HEAD: NEOX_LM_HEAD})


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    has_both = first in checkpoint.tensors and second in checkpoint.tensors
    return has_both and same_bytes(checkpoint, first, checkpoint, second)
