"""Check the sizes of vocabularies by config.json and the headers of the files. Needs no torch."""

from pathlib import Path

from model.checkpoint.tied import EMBEDDINGS
from model.common.errors import InputError
from model.language_model import open_language_model


def check_same_vocab_size(vocab_size: int, teacher_vocab_size: int, name: str) -> None:
    """Raise InputError if the teacher's vocabulary has another size."""
    if teacher_vocab_size != vocab_size:
        raise InputError(
            f"the teacher {name} has {teacher_vocab_size} tokens, the student {vocab_size}; "
            "distillation needs the same vocabulary."
        )


def check_embedding_rows(folder: Path, vocab_size: int) -> None:
    """Raise InputError if the files of a model have an embedding of another size than `config.json` says."""
    with open_language_model(folder) as checkpoint:
        for name in EMBEDDINGS:
            tensor = checkpoint.tensors.get(name)
            if tensor is not None and tensor.shape[0] != vocab_size:
                raise InputError(
                    f"{folder} has {tensor.shape[0]} rows in {checkpoint.name_in_files(name)}, but its config.json "
                    f"says {checkpoint.config_prefix}vocab_size = {vocab_size}; correct one of the two."
                )
