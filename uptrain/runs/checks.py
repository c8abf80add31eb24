"""Check that model, teacher, processes and settings of a run are compatible; errors name the option to change."""

from pathlib import Path

from model.common.errors import InputError
from model.common.launcher_variables import is_local_main_process
from model.language_model import read_language_config
from uptrain.data.teacher_logits import LogitsManifest, TeacherLogits
from uptrain.data.token_cache import TokenCache
from uptrain.distributed.accelerator import wants_sharding
from uptrain.models.decoder_layers import layer_class_names
from uptrain.models.vocabularies import check_same_vocab_size
from uptrain.runs.fingerprints import model_sha256
from uptrain.runs.settings import Settings

MAX_PROCESSES = 4096
"""The largest number of processes that a refused batch is tried with."""


def epochs_of(settings: Settings, cache: TokenCache) -> float:
    """Return how many times a run reads its data."""
    return settings.steps * settings.global_batch / cache.n_windows


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


def check_batch(global_batch: int, n_processes: int, is_new: bool = True) -> None:
    """Raise InputError if the global batch, which only a new run can change, is not divisible among the processes."""
    if global_batch % n_processes:
        divisors = [n for n in range(1, min(global_batch, MAX_PROCESSES) + 1) if global_batch % n == 0]
        raise InputError(
            f"a global batch of {global_batch} windows cannot be divided evenly among {n_processes} processes; "
            "possible numbers are "
            f"{', '.join(map(str, divisors))}. Change {'--global-batch-tokens or ' if is_new else ''}the number of "
            "processes."
        )


def check_teacher_logits(logits: TeacherLogits, vocab_size: int) -> None:
    """Raise InputError if the logits are of a teacher with a vocabulary of another size."""
    check_same_vocab_size(vocab_size, logits.manifest.vocab_size, f"of {logits.folder}, {logits.manifest.teacher},")


def check_is_not_student(model: Path | None, teacher: Path) -> None:
    """Raise InputError if the teacher is the model itself: their divergence is 0, and nothing would be trained."""
    if model is not None and model_sha256(model) == model_sha256(teacher):
        raise InputError(
            f"--teacher {teacher} is the same model as MODEL; give the parent that MODEL was converted from."
        )


def own_logits_warning(model: Path | None, folder: Path) -> str | None:
    """Return a warning if the model itself, not its parent, wrote a folder of `uptrain teach`.

    Return None if it did not, and on all processes but the main one of each machine.

    Raises InputError if the folder holds no logits.
    """
    teacher = LogitsManifest.parse(folder).teacher_sha256
    # One process of a machine reads the model's weights, for the warning that it prints.
    if model is None or not is_local_main_process() or model_sha256(model) != teacher:
        return None
    return (
        f"--teacher-logits {folder} are those of MODEL itself, from which it learns nothing; the parent that it was "
        "converted from should write them (uptrain teach PARENT)."
    )
