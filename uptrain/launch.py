"""From the options of `uptrain run`, `resume` and `extend` to a training under way."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from accelerate import PartialState

from model.checkpoint.folder import read_config
from model.errors import InputError
from uptrain.accelerator import check_launcher, has_accelerator
from uptrain.budget import Budget, Request, make_budget, make_schedule
from uptrain.data.batch import MICRO_BATCH_TOKENS
from uptrain.data.cache import Cache
from uptrain.data.texts import cache_of
from uptrain.extend import extend, extended_steps
from uptrain.fitting import check_tokenizer
from uptrain.losses import WITHOUT_TEACHER
from uptrain.parallel import leave, main_first
from uptrain.recognise import source_names
from uptrain.run import refuse_existing, resume, start
from uptrain.run_folder import RUN, Run
from uptrain.settings import Settings
from uptrain.show import Show, training_bar

SHARES = 10
"""A run saves and evaluates this often unless told otherwise."""


def launch_new(
    request: Request,
    *,
    model: Path | None,
    init: Path | None,
    data: tuple[str, ...],
    eval_data: str | None,
    seq_len: int | None,
    out: Path,
    max_minutes: float | None,
    **options: Any,
) -> None:
    """Start a run. Raises InputError for everything that can be known before training."""
    if (model is None) == (init is None):
        raise InputError("give either MODEL, or --init FOLDER to train from nothing.")
    folder = model or init
    assert folder is not None
    refuse_existing(out)
    cache = cache_of(data, folder, seq_len, out.with_name(f"{out.name}.data"))
    found = Cache.open(cache).seq_len
    if seq_len not in (None, found):
        raise InputError(f"{cache} has windows of {found} tokens, not {seq_len}; leave --seq-len out.")
    eval_cache = cache_of([eval_data], folder, found, out.with_name(f"{out.name}.eval-data")) if eval_data else None
    options |= {"data": cache, "eval_data": eval_cache}
    settings, budget = make_settings(request, folder, is_new=init is not None, **options)
    _watch(settings.steps, out, lambda show: start(settings, budget, folder, out, _deadline(max_minutes), show))


def launch_resumed(run: Path, max_minutes: float | None) -> None:
    """Go on with a run."""
    steps = Run.read(run).settings.steps
    _watch(steps, run, lambda show: resume(run, _deadline(max_minutes), show))


def launch_extended(
    run: Path, out: Path, alpha: float | None, tokens: int | None, steps: int | None, max_minutes: float | None
) -> None:
    """Make a longer run of one that is there, and go on with it."""
    total = extended_steps(Run.read(run), alpha, tokens, steps)
    check_launcher()
    main_first(lambda: extend(run, out, total), out / RUN)
    launch_resumed(out, max_minutes)


def _watch(steps: int, out: Path, work: Callable[[Show], str]) -> None:
    """Show a run while it goes on, and say how it ended."""
    with training_bar(steps) as show:
        status = work(show)
    leave()
    if PartialState().is_main_process:
        if status == "finished":
            click.echo(f"Finished {out}. Export it with: uptrain export {out} FOLDER")
        else:
            click.echo(f"Saved and stopped. Go on with: uptrain resume {out}")


def _deadline(max_minutes: float | None) -> float:
    return math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes


def make_settings(
    request: Request,
    folder: Path,
    *,
    is_new: bool,
    data: Path,
    eval_data: Path | None,
    teacher: Path | None,
    loss: str | None,
    schedule: str,
    warmup_steps: int | None,
    precision: str | None,
    micro_batch: int | None,
    save_every_steps: int | None,
    eval_every: int | None,
    **same: Any,
) -> tuple[Settings, dict[str, Any]]:
    """Resolve every default, and return the settings and where the number of steps comes from."""
    loss = loss or ("distill" if teacher else WITHOUT_TEACHER)
    if loss != WITHOUT_TEACHER and teacher is None:
        raise InputError(f"--loss {loss} learns from a teacher; name it with --teacher FOLDER.")
    cache = Cache.open(data)
    for path, opened in ((data, cache), *([(eval_data, Cache.open(eval_data))] if eval_data else [])):
        check_tokenizer(opened, path, folder)
    known = ({}, ()) if is_new else (read_config(folder)[1], source_names(folder))
    budget = make_budget(request, *known, cache.seq_len)
    plan = make_schedule(budget, schedule, warmup_steps)
    often = max(1, budget.steps // SHARES)
    settings = Settings(
        model="" if is_new else str(folder.resolve()),
        data=str(data.resolve()),
        eval_data=str(eval_data.resolve()) if eval_data else "",
        teacher=str(teacher.resolve()) if teacher else "",
        loss=loss,
        steps=budget.steps,
        global_batch=budget.global_batch_tokens // cache.seq_len,
        micro_batch=micro_batch or max(1, MICRO_BATCH_TOKENS // cache.seq_len),
        schedule=plan.kind,
        lr=plan.peak,
        warmup_steps=plan.warmup_steps,
        decay_fraction=plan.decay_fraction,
        original_steps=plan.original_steps,
        precision=precision or ("bf16" if has_accelerator() else "fp32"),
        save_every=save_every_steps or often,
        eval_every=eval_every or often,
        **same,
    )
    return settings, describe_budget(budget)


def describe_budget(budget: Budget) -> dict[str, Any]:
    original = budget.original.name if budget.original else None
    return {**asdict(budget), "original": original, "tokens": budget.tokens}
