"""Check that data, models and world size are compatible; errors name the option to change."""

import filecmp
import shlex
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from model.checkpoint.hf_folder import read_config
from model.common.console import echo_line, size, warn
from model.common.errors import InputError, prefix_path
from model.common.launcher_variables import is_local_main_process
from model.common.tokenizer import ADDED_TOKENS, TOKENIZER_JSON, VOCABULARIES, open_tokenizer
from model.completeness import check_head
from model.decoder.loading import LanguageModel
from model.decoder.transformers_classes import names_in_files
from model.decoder.transformers_model import TransformersModel
from model.language_model import open_language_model, read_language_config, wrapper_of
from uptrain.data.prepare.tokenizer import load_tokenizer
from uptrain.data.teacher_logits import LogitsManifest, TeacherLogits
from uptrain.data.token_cache import TokenCache
from uptrain.distributed.accelerator import wants_sharding
from uptrain.models.decoder_layers import layer_class_names
from uptrain.models.load import build_meta_from_config, build_meta_from_folder, choose_part, tensor_shapes
from uptrain.models.trainable_parts import part_pattern
from uptrain.models.vocabularies import check_embedding_rows, check_same_vocab_size
from uptrain.runs.fingerprints import model_sha256
from uptrain.runs.settings import Settings

MOST_PROCESSES = 4096
"""The largest number of processes that a refused batch is tried with."""
MUCH_TO_READ = 2 * 10**9
"""Bytes of token caches whose check takes long enough to be announced."""


def check_models(
    model: Path | None, teacher: Path | None, seq_lens: Iterable[int], trainable: str = "all", rank: int = 0
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
        check_embedding_rows(folder, each.head_weight.shape[0])
    if model and trainable != "all":
        choose_part(models[0], trainable, rank, model)
    if len(models) == 2:
        check_same_vocab_size(models[0].head_weight.shape[0], models[1].head_weight.shape[0], str(teacher))


def check_lm_heads(folders: Iterable[Path]) -> None:
    """Raise InputError for a folder whose model has no language-model head."""
    for folder in folders:
        read_config(folder)  # refuses other formats
        with open_language_model(folder) as checkpoint:
            check_head(checkpoint)


def check_layer_names(folder: Path, settings: Settings) -> tuple[str, ...]:
    """Return the class names of a model's decoder layers (`layer_class_names`).

    Raises InputError if there are none and the run needs them: to compile layers, recompute their activations or shard
    them.
    """
    names, sharded = layer_class_names(folder), wants_sharding()
    options = {
        "--compile": settings.compile,
        "--activation-checkpointing": settings.activation_checkpointing,
        "FSDP": sharded,
    }
    if not names and (needing := [option for option, given in options.items() if given]):
        raise InputError(
            f"{folder}: transformers does not say which modules are the decoder layers of model_type "
            f"{read_language_config(folder).get('model_type')!r}, so {' and '.join(needing)} cannot be used; leave "
            f"{'it' if len(needing) == 1 else 'them'} out{' (scripts/launch/accelerate/ddp.yaml)' if sharded else ''}."
        )
    return names


def check_tokenizer(recorded: str, cache: Path, folder: Path) -> None:
    """Raise InputError if a cache was made with another tokenizer than the model's.

    `recorded` is the fingerprint in the cache's manifest, "" if it has none.
    """
    if recorded and load_tokenizer(folder).sha256 != recorded:
        raise InputError(
            f"{cache} was made with another tokenizer than that of {folder}; prepare it with "
            f"--tokenizer {shlex.quote(str(folder))}."
        )


def check_vocabulary(cache: TokenCache, vocab_size: int, name: str) -> None:
    """Raise InputError if the cache holds ids outside the model's vocabulary.

    Ids that do not occur are ignored: some tokenizers have padding tokens without an embedding.
    """
    if cache.manifest.vocab_size > vocab_size and (highest := cache.highest_id()) >= vocab_size:
        raise InputError(
            f"{name} holds the id {highest}, but the model knows only those below {vocab_size}; prepare the data with "
            "the model's own tokenizer, from texts without the tokens that were added to it."
        )


def check_caches(caches: Iterable[TokenCache], vocab_size: int) -> None:
    """Raise InputError if a cache has changed since it was made, or by `check_vocabulary`. All files are read."""
    by_folder = {cache.folder.resolve(): cache for cache in caches}
    nbytes = sum(cache.nbytes for cache in by_folder.values())
    if nbytes > MUCH_TO_READ:
        echo_line(f"Checking {size(nbytes)} of token caches.")
    for cache in by_folder.values():
        cache.verify()
        check_vocabulary(cache, vocab_size, str(cache.folder))


def check_packing(model: LanguageModel, seq_len: int) -> None:
    """Raise InputError if the model cannot mask attention between documents of a window."""
    if isinstance(model, TransformersModel):
        model.check_packing(seq_len)


def check_teacher_logits(logits: TeacherLogits, vocab_size: int) -> None:
    """Raise InputError if the logits are of a teacher with a vocabulary of another size."""
    check_same_vocab_size(vocab_size, logits.manifest.vocab_size, f"of {logits.folder}, {logits.manifest.teacher},")


def check_is_not_student(model: Path | None, teacher: Path) -> None:
    """Raise InputError if the teacher is the model itself: their divergence is 0, and nothing would be trained."""
    if model is not None and model_sha256(model) == model_sha256(teacher):
        raise InputError(f"--teacher {teacher} is the same model as MODEL; give the parent that MODEL was merged from.")


def warn_of_own_logits(model: Path | None, folder: Path) -> None:
    """Warn if the model itself, not its parent, wrote the logits in a folder of `uptrain teach`.

    Raises InputError if the folder holds no logits.
    """
    teacher = LogitsManifest.parse(folder).teacher_sha256
    if model is not None and is_local_main_process() and model_sha256(model) == teacher:
        warn(
            f"--teacher-logits {folder} are those of MODEL itself, from which it learns nothing; the parent that it "
            "was merged from should write them (uptrain teach PARENT)."
        )


def check_teachers_tokenizer(folder: Path, teacher: Path) -> str | None:
    """Raise InputError if a token has another id in the teacher's tokenizer than in the student's.

    They may split texts differently. Returns a warning if a tokenizer cannot be opened: then nothing is compared, since
    the data may be tokenised already.
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


def check_exportable(folder: Path, part: str) -> None:
    """Raise InputError if parameters of a part have other names in memory than in the files: it could not be exported.

    transformers 5 joins experts and renames the head of GPT-NeoX, unless it is tied. With adapters, all names count.
    """
    pattern = part_pattern(part, read_language_config(folder))
    shapes, prefix = tensor_shapes(folder)
    with open_language_model(folder) as checkpoint:
        trained = (name for name in shapes if part == "lora" or pattern.search(name))
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
        _check_kv_heads(folder, model.theirs.config)
        names = (name for name, _ in model.theirs.named_parameters())
        _check_names(folder, names, "", names_in_files(model.theirs))


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


def check_batch(global_batch: int, n_processes: int, is_new: bool = True) -> None:
    """Raise InputError if the global batch, which only a new run can change, is not divisible among the processes."""
    if global_batch % n_processes:
        divisors = [n for n in range(1, min(global_batch, MOST_PROCESSES) + 1) if global_batch % n == 0]
        raise InputError(
            f"a global batch of {global_batch} windows cannot be divided evenly among {n_processes} processes; "
            "possible numbers are "
            f"{', '.join(map(str, divisors))}. Change {'--global-batch-tokens or ' if is_new else ''}the number of "
            "processes."
        )
