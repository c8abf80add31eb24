"""Check that models can be trained, run and exported here, alone and as student and teacher."""

import filecmp
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from model.checkpoint.hf_folder import read_config
from model.common.errors import InputError, prefix_path
from model.completeness import check_lm_head
from model.decoder.loading import LanguageModel
from model.decoder.transformers_classes import names_in_files
from model.decoder.transformers_model import TransformersModel
from model.language_model import open_language_model, read_language_config, wrapper_of
from model.tokenizer import ADDED_TOKENS, TOKENIZER_JSON, VOCABULARIES, open_tokenizer
from uptrain.distributed.collectives import all_reduce_sum
from uptrain.models.load import build_meta_from_config, build_meta_from_folder, make_trainable
from uptrain.models.stored_names import tensor_shapes
from uptrain.models.trainable_parts import part_pattern
from uptrain.models.vocabularies import check_embedding_rows, check_same_vocab_size

MAX_RENAMED = 0.1
"""Largest share of ids with another token in the teacher's tokenizer: a model may rename reserved tokens."""


def check_models(
    model: Path | None, teacher: Path | None, seq_lens: Iterable[int], trainable: str, lora_rank: int
) -> None:
    """Raise InputError for a student or teacher that cannot be used with any data in windows of these lengths.

    `model` is None for a student with random weights.
    """
    folders = [folder for folder in (model, teacher) if folder]
    check_lm_heads(folders)
    if model:
        check_exportable(model, trainable)
    models = [build_meta_from_folder(folder) for folder in folders]
    for folder, each in zip(folders, models, strict=True):
        for seq_len in seq_lens:
            with prefix_path(folder):
                check_packing(each, seq_len)
        check_embedding_rows(folder, each.lm_head_weight.shape[0])
    if model and trainable != "all":
        make_trainable(models[0], trainable, lora_rank, model)
    if len(models) == 2:
        check_same_vocab_size(models[0].lm_head_weight.shape[0], models[1].lm_head_weight.shape[0], str(teacher))


def check_lm_heads(folders: Iterable[Path]) -> None:
    """Raise InputError for a folder whose model has no language-model head."""
    for folder in folders:
        read_config(folder)  # refuses other formats
        with open_language_model(folder) as checkpoint:
            check_lm_head(checkpoint)


def check_packing(model: LanguageModel, seq_len: int) -> None:
    """Raise InputError if the model cannot mask attention between documents of a window."""
    if isinstance(model, TransformersModel):
        model.check_packing(seq_len)


def check_teacher_tokenizer(folder: Path, teacher: Path) -> str | None:
    """Compare the student's tokenizer with the teacher's; they may split texts differently.

    Returns a warning if one cannot be opened: then nothing is compared, since the data may be tokenised already. Raises
    InputError if a token has another id in the teacher's, or many ids other tokens.
    """
    if _have_equal_vocabularies(folder, teacher):
        return None
    try:
        own, theirs = open_tokenizer(folder).get_vocab(), open_tokenizer(teacher).get_vocab()
    except InputError as error:
        return f"whether student and teacher have the same tokenizer is not checked: {error}"
    if others := sorted(token for token in own.keys() & theirs.keys() if own[token] != theirs[token]):
        raise InputError(
            f"the teacher {teacher} has other ids than the student for {len(others):,} tokens, such as {others[0]!r}; "
            "distillation needs the same tokenizer."
        )
    names, others_names = ({i: token for token, i in vocabulary.items()} for vocabulary in (own, theirs))
    shared = names.keys() & others_names.keys()
    renamed = sorted(i for i in shared if names[i] != others_names[i])
    if len(renamed) > MAX_RENAMED * len(shared):
        raise InputError(
            f"the teacher {teacher} has other tokens than the student for {len(renamed):,} of {len(shared):,} ids, "
            f"such as {renamed[0]} ({names[renamed[0]]!r}, and of the teacher {others_names[renamed[0]]!r}); "
            "distillation needs the same tokenizer."
        )
    return None


def _have_equal_vocabularies(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same files of a vocabulary, byte for byte."""
    names = [
        name
        for name in (TOKENIZER_JSON, ADDED_TOKENS, *VOCABULARIES)
        if (one / name).is_file() or (other / name).is_file()
    ]
    equal, _, _ = filecmp.cmpfiles(one, other, names, shallow=False)
    return bool(names) and equal == names


def check_exportable(folder: Path, trainable: str) -> None:
    """Raise InputError if parameters of a part have other names in memory than in the files: it could not be exported.

    transformers 5 joins experts and renames the LM head of GPT-NeoX, unless it is tied. With adapters, all names count.
    """
    pattern = part_pattern(trainable, read_language_config(folder))
    shapes, prefix = tensor_shapes(folder)
    with open_language_model(folder) as checkpoint:
        trained = (name for name in shapes if trainable == "lora" or pattern.search(name))
        _check_names(folder, trained, prefix, checkpoint.tensors)


def check_init(folder: Path, seq_len: int) -> None:
    """Raise InputError if a model of the folder's config.json cannot be trained from random weights."""
    if (wrapper := wrapper_of(read_language_config(folder))) is not None:
        raise InputError(
            f"{folder} is of model_type {wrapper!r}, of which only the language model inside can be trained; --init "
            "needs a language model of its own."
        )
    model = build_meta_from_config(folder)
    check_packing(model, seq_len)
    if isinstance(model, TransformersModel):
        _check_kv_heads(folder, model.hf_model.config)
        names = (name for name, _ in model.hf_model.named_parameters())
        _check_names(folder, names, "", names_in_files(model.hf_model))


def _check_kv_heads(folder: Path, config: Any) -> None:
    n_heads = getattr(config, "num_attention_heads", 1)
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    if n_heads % n_kv_heads:
        raise InputError(
            f"{folder}/config.json has num_key_value_heads = {n_kv_heads}, which does not divide {n_heads} query heads."
        )


def _check_names(folder: Path, parameters: Iterable[str], prefix: str, files: Container[str]) -> None:
    for name in parameters:
        if name not in files and name.removeprefix(prefix) not in files:
            raise InputError(
                f"{folder} cannot be trained here: transformers holds its weights under other names than the files do "
                f"({name}), so other programs could not open the result. This affects mixture-of-experts models, and "
                "GPT-NeoX before conversion; train attention alone (--trainable attention)."
            )


def has_finite_weights(model: nn.Module, accelerator: Accelerator) -> bool:
    """Return whether all weights are finite. Each rank checks its own shards of a sharded model."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in map(torch.Tensor.detach, model.parameters())]
    n_broken = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for tensor in local:  # none in a teacher that shares all
        n_broken += ~tensor.isfinite().all()
    return not all_reduce_sum(accelerator, n_broken).item()
