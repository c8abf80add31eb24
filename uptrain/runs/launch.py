"""Launch `uptrain run`, `resume` and `extend`: resolve options, check inputs, train, and report the end."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from model.checkpoint.hf_folder import read_config
from model.common.console import echo, echo_line
from model.common.errors import InputError
from model.common.files import check_name
from uptrain.budget.budget import Budget, make_budget, repetition_warning
from uptrain.budget.identify import default_trainable, source_names
from uptrain.budget.learning_rate import WSD_DECAY_FRACTION, default_warmup
from uptrain.budget.memory import Models, Way
from uptrain.data.run_data import beside, cache_folder, cache_of, seq_len_of
from uptrain.data.teacher_logits import Manifest, TeacherLogits
from uptrain.data.token_cache import Cache
from uptrain.distributed.accelerator import check_launcher, has_accelerator
from uptrain.distributed.collectives import destroy_process_group, main_process_first
from uptrain.runs.checks import check_exportable, check_new, check_packing, check_teacher, check_tokenizer
from uptrain.runs.device_memory import fitting_micro_batch, has_estimate
from uptrain.runs.extend import extend, extended_steps
from uptrain.runs.folder import RUN, Run
from uptrain.runs.progress import ProgressSink, training_bar
from uptrain.runs.run import refuse_existing, resume, start
from uptrain.runs.settings import DEFAULT_RANK, RunOptions, Settings, default_micro_batch
from uptrain.training.losses import WITHOUT_TEACHER
from uptrain.training.models import build_meta, choose_part, parameter_names
from uptrain.training.optimizer import check_optimizer

DEFAULT_SAVES = 10
"""Default number of checkpoints and of evaluations in a run."""


def launch_new(options: RunOptions) -> None:
    """Start a run. Raises InputError for every error that can be detected before training."""
    if (options.model is None) == (options.init is None):
        raise InputError("give either MODEL, or --init FOLDER to train from nothing.")
    folder = options.model or options.init
    assert folder is not None
    out, deadline = options.out, _deadline(options.max_minutes)
    refuse_existing(out)
    check_optimizer(options.optimizer)
    # All options are checked before texts are tokenised, which may take hours.
    seq_len = seq_len_of(options.data, folder, options.seq_len)
    settings, budget = make_settings(options, folder, seq_len)
    check_models(options.model, options.teacher, seq_len, settings.trainable, settings.lora_rank)
    if options.init:
        check_new(options.init, seq_len)
    if options.teacher_logits:
        Manifest.parse(options.teacher_logits)
    if options.eval_data:
        _prepare([options.eval_data], folder, seq_len, beside(out, "eval_data"))
    _prepare(options.data, folder, seq_len, beside(out, "data"))
    if options.teacher_logits:
        TeacherLogits.open(options.teacher_logits, Cache.open(Path(settings.data)))
    warnings = warnings_of(settings)
    with training_bar(settings.steps) as show:
        status = start(settings, budget, folder, out, deadline, _warn_at_start(warnings, show))
    _end(out, status)


def check_models(model: Path | None, teacher: Path | None, seq_len: int, trainable: str, rank: int) -> None:
    """Raise InputError for a student or teacher that cannot be used with any data.

    `model` is None for a student with random weights.
    """
    if model:
        check_exportable(model, *parameter_names(model))
    models = [build_meta(folder) for folder in (model, teacher) if folder]
    for each in models:
        check_packing(each, seq_len)
    if model and trainable != "all":
        choose_part(models[0], trainable, rank, model)
    if len(models) == 2:
        check_teacher(models[0].head_weight.shape[0], models[1].head_weight.shape[0], str(teacher))


def launch_resumed(run: Path, max_minutes: float | None) -> None:
    """Resume a run."""
    steps, deadline = Run.read(run).settings.steps, _deadline(max_minutes)
    with training_bar(steps) as show:
        status = resume(run, deadline, show)
    _end(run, status)


def launch_extended(
    run: Path, out: Path, alpha: float | None, tokens: int | None, steps: int | None, max_minutes: float | None
) -> None:
    """Make a longer run from an existing one, and resume it."""
    total = extended_steps(Run.read(run), alpha, tokens, steps)
    check_launcher()
    main_process_first(lambda: extend(run, out, total), out / RUN)
    launch_resumed(out, max_minutes)


def _end(out: Path, status: str) -> None:
    """Leave the process group of a run that has ended, and print its status."""
    destroy_process_group()
    if PartialState().is_main_process:
        if status == "finished":
            echo(f"Finished {out}. Export it with: uptrain export {out} FOLDER")
        else:
            echo(f"Saved and stopped. Resume it with: uptrain resume {out}")


def _deadline(max_minutes: float | None) -> float:
    return math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes


def _prepare(data: Sequence[str], folder: Path, seq_len: int, beside: Path) -> None:
    """Make the token cache of the sources if necessary. Raises InputError if its tokenizer is another."""
    path = cache_of(data, folder, seq_len, beside)
    check_tokenizer(Cache.open(path), path, folder)


def _absolute(path: Path | None) -> str:
    """Return an absolute path for run.json, "" for None. Raises InputError for a name that JSON cannot hold."""
    if path is None:
        return ""
    check_name(path.resolve(), "a folder")
    return str(path.resolve())


def warnings_of(settings: Settings) -> list[str]:
    """Return warnings about a run's data."""
    cache = Cache.open(Path(settings.data))
    warnings = [repetition_warning(settings.steps * settings.global_batch / cache.n_windows)]
    if settings.eval_data and Cache.open(Path(settings.eval_data)).manifest.sha256 == cache.manifest.sha256:
        warnings.append("the held-out data are the training data, so held-out losses will not be those of new text.")
    return [warning for warning in warnings if warning]


def _warn_at_start(warnings: list[str], show: ProgressSink) -> ProgressSink:
    """Return `show`, extended to print the warnings before the start event."""

    def warn_and_show(record: dict[str, Any]) -> None:
        for warning in warnings if record.get("event") == "started" else ():
            echo_line(f"Warning: {warning}")
        show(record)

    return warn_and_show


def _micro_batch(options: RunOptions, way: Way, config: dict[str, Any], seq_len: int, precision: str, rank: int) -> int:
    """Return the default micro-batch, in windows: one that fits the device if the model's memory can be estimated.

    Raises InputError if one window does not fit.
    """
    if options.model is None or not has_estimate(config):
        return default_micro_batch(seq_len)
    models = Models.read(options.model, options.teacher, seq_len, precision, options.optimizer, rank)
    return fitting_micro_batch(models, way, options.model, options.teacher)


def make_settings(options: RunOptions, folder: Path, seq_len: int) -> tuple[Settings, Budget]:
    """Resolve every default; return the settings and the budget. The token caches need not exist yet.

    `folder` is that of `options.model` or `options.init`.
    """
    if options.teacher and options.teacher_logits:
        raise InputError("give either --teacher or --teacher-logits: the logits stand for the teacher.")
    taught = options.teacher or options.teacher_logits
    loss = options.loss or ("distill" if taught else WITHOUT_TEACHER)
    if loss != WITHOUT_TEACHER and taught is None:
        raise InputError(f"--loss {loss} learns from a teacher; name it with --teacher FOLDER.")
    if loss == WITHOUT_TEACHER and options.teacher_logits:
        raise InputError(f"--loss {loss} does not use --teacher-logits; leave one of the two out.")
    config, names = (read_config(folder)[1], source_names(folder)) if options.model else ({}, ())
    trainable = options.trainable or (default_trainable(folder, config) if options.model else "all")
    if options.lora_rank and trainable != "lora":
        raise InputError(f"--lora-rank is for --trainable lora, not {trainable}; leave one of the two out.")
    rank = (options.lora_rank or DEFAULT_RANK) if trainable == "lora" else 0
    budget = make_budget(options.budget, config, names, seq_len)
    way = Way(trainable, 1, options.activation_checkpointing)
    interval = max(1, budget.steps // DEFAULT_SAVES)
    precision = options.precision or ("bf16" if has_accelerator() else "fp32")
    eval_cache = cache_folder([options.eval_data], beside(options.out, "eval_data")) if options.eval_data else None
    settings = Settings(
        model=_absolute(options.model),
        data=_absolute(cache_folder(options.data, beside(options.out, "data"))),
        eval_data=_absolute(eval_cache),
        teacher=_absolute(options.teacher),
        teacher_logits=_absolute(options.teacher_logits),
        loss=loss,
        steps=budget.steps,
        global_batch=budget.global_batch_tokens // seq_len,
        micro_batch=options.micro_batch or _micro_batch(options, way, config, seq_len, precision, rank),
        schedule=options.schedule,
        lr=budget.peak_lr,
        warmup_steps=default_warmup(budget.steps) if options.warmup_steps is None else options.warmup_steps,
        decay_fraction=WSD_DECAY_FRACTION,
        original_steps=budget.original_steps or 0,
        precision=precision,
        optimizer=options.optimizer,
        weight_decay=options.weight_decay,
        trainable=trainable,
        lora_rank=rank,
        seed=options.seed,
        save_every=options.save_every or interval,
        keep_last=options.keep_last,
        eval_every=options.eval_every or interval,
        spike_sigma=options.spike_sigma,
        compile=options.compile,
        activation_checkpointing=options.activation_checkpointing,
        track=options.track,
    )
    return settings, budget
