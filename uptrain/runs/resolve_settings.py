"""Resolve the options of `uptrain run` into the settings of a run, with every default."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.common.command_options import AUTO_DEVICE
from model.common.errors import InputError
from model.common.launcher_variables import world_size
from model.decoder.attention import flash_attention_on
from model.files.paths import check_name
from model.language_model import read_language_config
from uptrain.budget.budget import Budget, check_default_lr, default_trainable, make_budget
from uptrain.budget.conversion_record import conversion_method, source_names
from uptrain.checkpoints.files import default_interval
from uptrain.data.default_sizes import default_micro_batch
from uptrain.data.run_data import cache_folder, run_cache_folder
from uptrain.data.token_cache import MANIFEST
from uptrain.distributed.accelerator import choose_device, default_precision
from uptrain.distributed.collectives import warn_on_local_main
from uptrain.estimates.memory import MemoryEstimator, MemoryOptions
from uptrain.models.trainable_choices import DEFAULT_LORA_RANK, resolve_lora_rank
from uptrain.runs.device_memory import fitting_micro_batch, has_estimate, too_large_warning
from uptrain.runs.settings import RunOptions, Settings
from uptrain.training.losses import WITHOUT_TEACHER


def resolve_settings(options: RunOptions, folder: Path, seq_len: int) -> tuple[Settings, Budget]:
    """Resolve every default; return the settings and the budget. The token caches need not exist yet.

    `folder` is that of `options.model` or `options.init`.
    """
    loss = _loss(options)
    if options.eval_every and options.eval_data is None:
        raise InputError("--eval-every needs held-out data to evaluate on; name them with --eval-data.")
    config, names = (read_language_config(folder), source_names(folder)) if options.model else ({}, ())
    trainable = options.trainable or (default_trainable(folder, config) if options.model else "all")
    lora_rank = resolve_lora_rank(options.lora_rank, trainable)
    check_default_lr(options.budget, options.optimizer)
    method = conversion_method(folder) if options.model else None
    budget = make_budget(options.budget, config, names, seq_len, method, trainable)
    schedule = budget.schedule(options.schedule, options.warmup_steps, from_scratch=options.model is None)
    chosen = MemoryOptions(trainable, 1, options.activation_checkpointing)
    interval = default_interval(budget.steps)
    device = choose_device(AUTO_DEVICE)  # also makes it the one that warnings are about
    precision = options.precision or default_precision(device)
    eval_out = run_cache_folder(options.out, "eval_data")
    eval_cache = None if options.eval_data is None else cache_folder([options.eval_data], eval_out)
    global_batch = budget.global_batch_tokens // seq_len
    n_windows = global_batch // world_size()
    settings = Settings(
        model=_absolute(options.model),
        data=_absolute(cache_folder(options.data, run_cache_folder(options.out, "data"))),
        eval_data=_absolute(eval_cache),
        teacher=_absolute(options.teacher),
        teacher_logits=_absolute(options.teacher_logits),
        loss=loss,
        steps=budget.steps,
        global_batch=global_batch,
        micro_batch=_micro_batch(options, chosen, config, seq_len, n_windows, precision, lora_rank, device),
        schedule=schedule.kind,
        lr=schedule.peak_lr,
        warmup_steps=schedule.warmup_steps,
        decay_fraction=schedule.decay_fraction,
        original_steps=schedule.original_steps,
        precision=precision,
        optimizer=options.optimizer,
        weight_decay=options.weight_decay,
        trainable=trainable,
        lora_rank=lora_rank,
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


def _loss(options: RunOptions) -> str:
    """Return the loss. Raises InputError if it does not agree with the teacher."""
    if options.teacher and options.teacher_logits:
        raise InputError("give either --teacher or --teacher-logits: the logits stand for the teacher.")
    has_teacher = bool(options.teacher or options.teacher_logits)
    loss = options.loss or ("distill" if has_teacher else WITHOUT_TEACHER)
    if loss != WITHOUT_TEACHER and not has_teacher:
        raise InputError(f"--loss {loss} learns from a teacher; name it with --teacher FOLDER.")
    if loss == WITHOUT_TEACHER and options.teacher_logits:
        raise InputError(f"--loss {loss} does not use --teacher-logits; leave one of the two out.")
    return loss


def find_data(settings: Settings, run: Path) -> Settings:
    """Return the settings with the current paths of the data, which may lie beside a run that was moved.

    Raises InputError if they are missing.
    """
    moved: dict[str, Any] = {}
    for what, path in (("data", settings.data), ("eval_data", settings.eval_data)):
        if path and not (Path(path) / MANIFEST).is_file():
            beside = [run_cache_folder(folder, what) for folder in (run, run.resolve())]  # `run` may be a link
            found = next((cache for cache in beside if (cache / MANIFEST).is_file()), None)
            if found is None:
                raise InputError(f"the run's data, {path}, are missing; restore them, or put them at {beside[0]}.")
            moved[what] = str(found.resolve())
    return replace(settings, **moved)


def _micro_batch(
    options: RunOptions,
    chosen: MemoryOptions,
    config: dict[str, Any],
    seq_len: int,
    n_windows: int,
    precision: str,
    lora_rank: int,
    device: torch.device,
) -> int:
    """Return the micro-batch, in windows. The default fits the device if the model's memory can be estimated.

    `n_windows`: how many a process has in a step.

    Raises InputError if one window does not fit; only warns if the user chose the micro-batch.
    """
    if options.model is None or not has_estimate(config):
        return options.micro_batch or default_micro_batch(seq_len, n_windows)
    estimator = MemoryEstimator.read(
        options.model, options.teacher, seq_len, precision, options.optimizer, lora_rank or DEFAULT_LORA_RANK
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    has_flash = flash_attention_on(device, dtype, estimator.sizes.head_dim)
    estimator = replace(estimator, repeats_kv=not has_flash)
    estimator.check_lora_rank(chosen.trainable)
    warn_on_local_main(estimator.activation_warning(chosen.trainable))
    if options.micro_batch:
        as_run = replace(chosen, micro_batch=min(options.micro_batch, n_windows))
        warn_on_local_main(too_large_warning(estimator, as_run))
        return options.micro_batch
    return fitting_micro_batch(estimator, chosen, n_windows, options.model, options.teacher)


def _absolute(path: Path | None) -> str:
    """Return an absolute path for run.json, "" for None. Raises InputError for a name that JSON cannot hold."""
    if path is None:
        return ""
    check_name(path.resolve(), "a folder")
    return str(path.resolve())
