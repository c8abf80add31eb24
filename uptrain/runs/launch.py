"""Launch `uptrain run`, `resume` and `extend`: resolve options, check inputs, train, and report the end."""

import math
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from model.common.console import echo, warn
from model.common.errors import InputError
from model.common.launcher_variables import world_size
from model.decoder.attention import gpu_has_flash_attention, is_flash_head_dim, torch_has_packed_attention
from model.decoder.config import is_native, read_llama_config
from model.files.names import METRICS, RUN_JSON
from model.files.paths import refuse_inside
from model.language_model import read_language_config
from uptrain.budget.budget import (
    BudgetOptions,
    check_repetition,
    evaluation_warning,
    few_steps_warning,
    repetition_warning,
)
from uptrain.budget.conversion_record import no_teacher_warning, teacher_warning
from uptrain.budget.identify import shape_warning
from uptrain.data.checks import check_has_targets, check_tokenizer
from uptrain.data.default_sizes import context_warning
from uptrain.data.run_data import (
    ensure_cache,
    is_prepared_data,
    overlap_warning,
    run_cache_folder,
    seq_len_of,
    shared_source_warning,
    surplus_warning,
)
from uptrain.data.teacher_logits import TeacherLogits
from uptrain.data.token_cache import TokenCache
from uptrain.distributed.accelerator import check_launcher, check_trackers, uses_gpu
from uptrain.distributed.collectives import destroy_process_group, on_main_without_group, warn_on_local_main
from uptrain.models.checks import check_init, check_models, check_teacher_tokenizer
from uptrain.models.trainable_parts import text_only_warning
from uptrain.runs.checks import check_batch, check_is_not_student, check_layer_names, epochs_of, own_logits_warning
from uptrain.runs.extend import extend, extended_steps
from uptrain.runs.make_folder import refuse_existing
from uptrain.runs.progress import ProgressSink, training_bar
from uptrain.runs.resolve_settings import find_data, resolve_settings
from uptrain.runs.run_folder import Run
from uptrain.runs.settings import RunOptions, Settings
from uptrain.runs.start_and_resume import FINISHED_BEFORE, resume, start
from uptrain.training.compiler import check_compiler
from uptrain.training.learning_rate import EXTENDABLE
from uptrain.training.loss_rise import rise_warning
from uptrain.training.metrics_log import read_metrics
from uptrain.training.optimizer import check_optimizer


def launch_new(options: RunOptions) -> None:
    """Start a run. Raises InputError for every error that can be detected before training."""
    if (options.model is None) == (options.init is None):
        raise InputError("give either MODEL, or --init FOLDER to train from scratch.")
    folder = options.model or options.init
    assert folder is not None
    out, deadline = options.out, _deadline(options.max_minutes)
    refuse_existing(out)
    refuse_inside(out, folder, options.teacher)
    if options.teacher:
        read_language_config(options.teacher)  # refuses what is no Hugging Face folder, before its memory is estimated
    check_optimizer(options.optimizer)
    if options.compile:
        check_compiler("--compile", "leave it out")
    seq_len = seq_len_of(options.data, folder, options.seq_len)
    settings, budget = resolve_settings(options, folder, seq_len)
    eval_data = [] if options.eval_data is None else [options.eval_data]
    eval_seq_len = seq_len_of(eval_data, folder, None) if is_prepared_data(eval_data) else seq_len
    seq_lens = sorted({seq_len, eval_seq_len})
    _check_options(options, folder, settings, seq_lens)  # before texts are tokenised, which may take hours
    overlap = overlap_warning(options.data, eval_data)
    warn_on_local_main(overlap)
    if eval_data:
        _make_cache(eval_data, folder, seq_len, run_cache_folder(out, "eval_data"), "--eval-data")
    warn_on_local_main(surplus_warning(options.data, budget.tokens, run_cache_folder(out, "data")))
    _make_cache(options.data, folder, seq_len, run_cache_folder(out, "data"), "--data")
    cache = TokenCache.open(Path(settings.data))
    check_repetition(options.budget, budget.steps, epochs_of(settings, cache))
    if options.teacher_logits:
        TeacherLogits.open(options.teacher_logits, cache)
    config = read_language_config(folder)
    # Who gives --loss without a teacher chose to train without one, so nothing is said.
    trains_without_teacher = options.model and not (options.teacher or options.teacher_logits or options.loss)
    warnings = [
        few_steps_warning(options.budget, budget), shape_warning(config, options.budget.original),
        context_warning(config, max(seq_lens)), _packing_warning(config, settings.precision),
        text_only_warning(config), _evaluation_warning(settings, budget.tokens),
        no_teacher_warning(folder) if trains_without_teacher else None,
        *warnings_of(settings, warned_of_overlap=bool(overlap)),
    ]  # fmt: skip
    with training_bar(settings.steps) as show:
        status = start(settings, budget, folder, out, deadline, _warn_at_start(list(filter(None, warnings)), show))
    _end(out, status)


def _check_options(options: RunOptions, folder: Path, settings: Settings, seq_lens: list[int]) -> None:
    """Raise InputError if models, batch, launcher or trackers do not fit. Warn of logits that teach nothing."""
    check_layer_names(folder, settings)
    check_models(options.model, options.teacher, seq_lens, settings.trainable, settings.lora_rank)
    if options.teacher:
        warn_on_local_main(
            check_teacher_tokenizer(folder, options.teacher),
            teacher_warning(options.model, options.teacher) if options.model else None,
        )
        if settings.loss == "distill":
            check_is_not_student(options.model, options.teacher)
    if options.init:
        check_init(options.init, max(seq_lens))
    check_batch(settings.global_batch, world_size())
    check_launcher()
    check_trackers(settings.track)
    if options.teacher_logits:
        warn_on_local_main(own_logits_warning(options.model, options.teacher_logits))


def launch_resumed(
    run: Path, micro_batch: int | None, activation_checkpointing: bool, max_minutes: float | None
) -> None:  # fmt: skip
    """Resume a run, with another micro-batch or activation checkpointing from now on if these are given."""
    changes: dict[str, Any] = {} if micro_batch is None else {"micro_batch": micro_batch}
    if activation_checkpointing:
        changes["activation_checkpointing"] = True
    _resume(_with_name(run), max_minutes, [], changes)


def launch_extended(
    run: Path, out: Path, alpha: float | None, tokens: int | None, steps: int | None, max_minutes: float | None
) -> None:
    """Make a longer run from an existing one, and resume it."""
    run = _with_name(run)
    wanted = BudgetOptions(alpha, tokens, steps)
    total = extended_steps(Run.read(run), wanted)
    check_launcher()
    on_main_without_group(lambda: extend(run, out, total, wanted), out / RUN_JSON)
    _resume(out, max_minutes, warnings_of(find_data(Run.read(out).settings, out)), {})


def _with_name(run: Path) -> Path:
    """Return the path of a run with its name, which `.` and `..` lack: data beside it and trackers have this name."""
    return run.resolve() if run.name in ("", "..") else run


def _resume(run: Path, max_minutes: float | None, warnings: list[str], changes: dict[str, Any]) -> None:
    settings, deadline = Run.read(run).settings, _deadline(max_minutes)
    check_optimizer(settings.optimizer)
    if settings.compile:
        check_compiler("--compile", "set CXX to its path")
    with training_bar(settings.steps) as show:
        status = resume(run, changes, deadline, _warn_at_start(warnings, show))
    _end(run, status)


def _end(out: Path, status: str) -> None:
    """Leave the process group of a run that has ended, and print its status."""
    destroy_process_group()
    if PartialState().is_main_process:
        export = f"Export it with: uptrain export {shlex.quote(str(out))} FOLDER"
        if status == FINISHED_BEFORE:
            longer = f"Train it for longer with: uptrain extend {shlex.quote(str(out))} --out RUN2 --steps N\n"
            is_extendable = Run.read(out).settings.schedule in EXTENDABLE
            echo(f"{out} is finished already, and has not changed. {longer if is_extendable else ''}{export}")
        elif status == "finished":
            with suppress(InputError):  # a damaged line of metrics is no failure of the run
                settings = Run.read(out).settings
                if warning := rise_warning(read_metrics(out / METRICS), settings.lr, bool(settings.teacher_logits)):
                    warn(warning)
            echo(f"Finished {out}. {export}")
        else:
            n = PartialState().num_processes
            launcher = f" (in {n} processes, by the launcher that started them)" if n > 1 else ""
            echo(f"Saved and stopped. Resume it with: uptrain resume {shlex.quote(str(out))}{launcher}")


def _deadline(max_minutes: float | None) -> float:
    return math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes


def _make_cache(data: Sequence[str], folder: Path, seq_len: int, out: Path, option: str) -> None:
    """Make the token cache of the sources if necessary.

    Raises InputError if its tokenizer is another, or there is nothing to predict in it.
    """
    path = ensure_cache(data, folder, seq_len, out, option)
    cache = TokenCache.open(path)
    check_tokenizer(cache.manifest.tokenizer_sha256, path, folder)
    check_has_targets(cache, f"{option} {path}")


def _packing_warning(config: dict[str, Any], precision: str) -> str | None:
    """Return a warning if attention runs document by document on a GPU."""
    if not is_native(config) or not uses_gpu():
        return None
    slow = "so each document of a window is computed by itself, which is slow on a GPU"
    if not torch.cuda.is_available():
        return f"only CUDA GPUs have flash attention here, {slow}."
    if not gpu_has_flash_attention():
        return f"the GPU ({torch.cuda.get_device_name()}) is older than Ampere and has no flash attention, {slow}."
    if not torch_has_packed_attention():
        return (
            f"torch {torch.__version__} has no attention for packed documents with grouped heads, {slow}; install a "
            "newer torch."
        )
    if precision == "fp32":
        return f"--precision fp32 has no flash attention, {slow}; --precision bf16 has."
    head_dim = read_llama_config(config).head_dim
    if not is_flash_head_dim(head_dim):
        return f"heads of {head_dim} dimensions have no flash attention, {slow}; multiples of 8 up to 256 have."
    return None


def _evaluation_warning(settings: Settings, n_tokens: int) -> str | None:
    if not settings.eval_data:
        return None
    n_evaluations = -(-settings.steps // settings.eval_every) + 1  # before the first step, and after the last one too
    return evaluation_warning(n_evaluations * TokenCache.open(Path(settings.eval_data)).manifest.n_tokens, n_tokens)


def warnings_of(settings: Settings, warned_of_overlap: bool = False) -> list[str]:
    """Return warnings about a run's data. `warned_of_overlap`: the files that are also held out were named before."""
    cache = TokenCache.open(Path(settings.data))
    warnings = [repetition_warning(epochs_of(settings, cache))]
    if settings.eval_data and not warned_of_overlap:
        held_out = TokenCache.open(Path(settings.eval_data)).manifest
        if held_out.sha256 == cache.manifest.sha256:
            warnings.append(
                "the held-out data are the training data, so held-out losses will not be those of new text."
            )
        else:
            warnings.append(shared_source_warning(cache.manifest, held_out))
    return [warning for warning in warnings if warning]


def _warn_at_start(warnings: list[str], show: ProgressSink) -> ProgressSink:
    """Return `show`, extended to print the warnings before the event that the training begins or goes on."""

    def warn_and_show(record: dict[str, Any]) -> None:
        for warning in warnings if record.get("event") in ("started", "resumed") else ():
            warn(warning)
        show(record)

    return warn_and_show
