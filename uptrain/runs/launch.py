"""From the options of `uptrain run`, `resume` and `extend` to a training under way."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from model.checkpoint.hf_folder import read_config
from model.common.console import echo, echo_line
from model.common.errors import InputError
from model.common.files import check_name
from uptrain.budget.budget import Budget, BudgetOptions, make_budget, make_schedule, repetition_warning
from uptrain.budget.identify import source_names
from uptrain.data.run_data import beside, cache_of, seq_len_of
from uptrain.data.token_cache import Cache
from uptrain.distributed.accelerator import check_launcher, has_accelerator
from uptrain.distributed.collectives import destroy_process_group, main_process_first
from uptrain.runs.checks import check_exportable, check_packing, check_teacher, check_tokenizer
from uptrain.runs.extend import extend, extended_steps
from uptrain.runs.folder import RUN, Run
from uptrain.runs.progress import ProgressSink, training_bar
from uptrain.runs.run import refuse_existing, resume, start
from uptrain.runs.settings import Settings, default_micro_batch
from uptrain.training.losses import WITHOUT_TEACHER
from uptrain.training.models import build_meta, parameter_names

SHARES = 10
"""A run saves and evaluates this often unless told otherwise."""


def launch_new(
    request: BudgetOptions,
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
    deadline = _deadline(max_minutes)
    refuse_existing(out)
    # All that is refused for what the options say is refused before texts are tokenised, which may take hours.
    length = seq_len_of(data, folder, seq_len)
    settings, budget = make_settings(request, folder, is_new=init is not None, seq_len=length, **options)
    check_models(model, teacher=Path(settings.teacher) if settings.teacher else None, seq_len=length)
    eval_cache = _cache([eval_data], folder, length, beside(out, "eval_data")) if eval_data else None
    cache = _cache(data, folder, length, beside(out, "data"))
    settings = replace(settings, data=_text(cache), eval_data=_text(eval_cache))
    warnings = warnings_of(settings)
    _watch(settings.steps, out, lambda show: start(settings, budget, folder, out, deadline, _after(warnings, show)))


def check_models(model: Path | None, teacher: Path | None, seq_len: int) -> None:
    """Refuse models that could not be trained, or taught by, whatever the data; `model` None is one from nothing."""
    if model:
        check_exportable(model, *parameter_names(model))
    pair = [build_meta(folder) for folder in (model, teacher) if folder]
    for each in pair:
        check_packing(each, seq_len)
    if len(pair) == 2:
        check_teacher(pair[0].head_weight.shape[0], pair[1].head_weight.shape[0], str(teacher))


def launch_resumed(run: Path, max_minutes: float | None) -> None:
    """Go on with a run."""
    steps, deadline = Run.read(run).settings.steps, _deadline(max_minutes)
    _watch(steps, run, lambda show: resume(run, deadline, show))


def launch_extended(
    run: Path, out: Path, alpha: float | None, tokens: int | None, steps: int | None, max_minutes: float | None
) -> None:
    """Make a longer run of one that is there, and go on with it."""
    total = extended_steps(Run.read(run), alpha, tokens, steps)
    check_launcher()
    main_process_first(lambda: extend(run, out, total), out / RUN)
    launch_resumed(out, max_minutes)


def _watch(steps: int, out: Path, work: Callable[[ProgressSink], str]) -> None:
    """Show a run while it goes on, and say how it ended."""
    with training_bar(steps) as show:
        status = work(show)
    destroy_process_group()
    if PartialState().is_main_process:
        if status == "finished":
            echo(f"Finished {out}. Export it with: uptrain export {out} FOLDER")
        else:
            echo(f"Saved and stopped. Go on with: uptrain resume {out}")


def _deadline(max_minutes: float | None) -> float:
    return math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes


def _cache(data: Sequence[str], folder: Path, seq_len: int, beside: Path) -> Path:
    """Return the cache that sources name or are made into. Raises InputError where it is of another tokenizer."""
    path = cache_of(data, folder, seq_len, beside)
    check_tokenizer(Cache.open(path), path, folder)
    return path


def _text(path: Path | None) -> str:
    """Return a path as run.json holds it. Raises InputError where that is impossible."""
    if path is None:
        return ""
    check_name(path.resolve(), "a folder")
    return str(path.resolve())


def warnings_of(s: Settings) -> list[str]:
    """Return what is to be said of a run's data."""
    cache = Cache.open(Path(s.data))
    found = [repetition_warning(s.steps * s.global_batch / cache.n_windows)]
    if s.eval_data and Cache.open(Path(s.eval_data)).manifest.sha256 == cache.manifest.sha256:
        found.append("the held-out data are the training data, so held-out losses will not be those of new text.")
    return [warning for warning in found if warning]


def _after(warnings: list[str], show: ProgressSink) -> ProgressSink:
    """Say what is to be said of a run once it has begun, and show it."""

    def warn_and_show(record: dict[str, Any]) -> None:
        for warning in warnings if record.get("event") == "started" else ():
            echo_line(f"Warning: {warning}")
        show(record)

    return warn_and_show


def make_settings(
    request: BudgetOptions,
    folder: Path,
    *,
    is_new: bool,
    seq_len: int,
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
    """Resolve every default; return the settings, but for the data, and where the number of steps comes from."""
    loss = loss or ("distill" if teacher else WITHOUT_TEACHER)
    if loss != WITHOUT_TEACHER and teacher is None:
        raise InputError(f"--loss {loss} learns from a teacher; name it with --teacher FOLDER.")
    known = ({}, ()) if is_new else (read_config(folder)[1], source_names(folder))
    budget = make_budget(request, *known, seq_len)
    plan = make_schedule(budget, schedule, warmup_steps)
    often = max(1, budget.steps // SHARES)
    settings = Settings(
        model="" if is_new else _text(folder),
        data="",
        eval_data="",
        teacher=_text(teacher),
        loss=loss,
        steps=budget.steps,
        global_batch=budget.global_batch_tokens // seq_len,
        micro_batch=micro_batch or default_micro_batch(seq_len),
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
