"""Check that the embedding has a row for each token of `vocab_size`."""

from collections.abc import Iterator

from model.checkpoint import Checkpoint
from model.common import checks
from model.common.errors import CheckpointError
from model.families import find_family


def check_vocabulary(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if transformers could open neither the source nor the output, for its vocabulary's size."""
    if problem := next(vocabulary_problems(checkpoint), None):
        raise CheckpointError(problem)


def vocabulary_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield what is wrong with `vocab_size`: transformers refuses an embedding of more or fewer rows."""
    match = find_family(checkpoint.config)
    vocab_size, embedding = match.config.get("vocab_size"), match.family.names.embedding or "embed_tokens"
    for name, tensor in checkpoint.tensors.items():
        n_rows = tensor.shape[0] if tensor.shape else 0
        if name.endswith(f"{embedding}.weight") and vocab_size not in (None, n_rows):
            place = f" of {match.text_config}" if match.text_config else ""
            yield (
                f"config.json has vocab_size = {checks.short_repr(vocab_size)}, but {name} has {n_rows} rows, which "
                f"transformers refuses; set vocab_size{place} to {n_rows}."
            )
