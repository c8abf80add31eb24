"""A run: its folder, and the way from settings to a training under way.

RUN/run.json              settings, budget, identities of data and model, versions
RUN/model/                the model's config and tokenizer files, as they were: what resuming and exporting need
RUN/checkpoints/          see `uptrain.training_checkpoint`
RUN/metrics.jsonl         see `uptrain.metrics`
RUN/run_state.json        {"status": "running" | "preempted" | "finished" | "halted" | "failed", "step": …}
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from model.checkpoint.folder import json_text, list_files, read_config
from model.errors import InputError
from model.staging import sync_file, sync_folder
from uptrain.data.cache import Cache
from uptrain.fitting import check_batch, check_teacher, check_vocabulary
from uptrain.loop import Halted, Progress, Training, train
from uptrain.metrics import Metrics
from uptrain.models import (
    block_names,
    empty_student,
    load_student,
    load_teacher,
    random_student,
    recompute_activations,
)
from uptrain.optimizer import make_optimizer
from uptrain.parallel import make_accelerator, on_main, shard_teacher
from uptrain.schedule import Schedule
from uptrain.settings import Settings
from uptrain.signals import stop_request
from uptrain.trainee import Trainee, blocks, choose_trainable
from uptrain.training_checkpoint import Checkpoints, Found, load

RUN, MODEL, CHECKPOINTS, METRICS, STATE = "run.json", "model", "checkpoints", "metrics.jsonl", "run_state.json"
Show = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """What RUN/run.json holds."""

    settings: Settings
    budget: dict[str, Any]
    """How many steps, and where the number comes from."""
    cache_sha256: str
    config_sha256: str
    versions: dict[str, str]
    parent: dict[str, Any] | None = None
    """The run and step that this one goes on from, if it extends one."""

    @classmethod
    def read(cls, folder: Path) -> "Run":
        path = folder / RUN
        if not path.is_file():
            raise InputError(f"{folder} is not a run: it has no {RUN}; `uptrain run … --out {folder}` makes one.")
        try:
            found = json.loads(path.read_bytes())
            settings = found.pop("settings")
            return cls(**found | {"settings": Settings(**settings | {"track": tuple(settings["track"])})})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is damaged, or of another version of Groupwise ({error}).") from error


def schedule_of(s: Settings) -> Schedule:
    return Schedule(s.schedule, s.lr, s.steps, s.warmup_steps, s.decay_fraction, s.original_steps)


def start(s: Settings, budget: dict[str, Any], config_folder: Path, out: Path, deadline: float, show: Show) -> str:
    """Make the folder of a new run, and train; return how it ended (see `execute`).

    `config_folder` has the config and tokenizer: the model's folder, or that of a model to be trained from nothing.
    """
    _, config = read_config(config_folder)
    accelerator = make_accelerator(s.precision, block_names(config), s.track, out)
    check_batch(s.global_batch, accelerator.num_processes)
    on_main(accelerator, lambda: make_folder(s, budget, config_folder, out))
    return execute(out, accelerator, None, deadline, show)


def resume(folder: Path, deadline: float, show: Show) -> str:
    """Train on from the newest whole checkpoint, with any number of processes; from the beginning if there is none."""
    run = Run.read(folder)
    _, config = read_config(folder / MODEL)
    accelerator = make_accelerator(run.settings.precision, block_names(config), run.settings.track, folder)
    check_batch(run.settings.global_batch, accelerator.num_processes)
    checkpoints = Checkpoints(folder / CHECKPOINTS, accelerator, run.settings.keep_last)
    return execute(folder, accelerator, checkpoints.newest(), deadline, show)


def make_folder(
    s: Settings,
    budget: dict[str, Any],
    config_folder: Path,
    out: Path,
    parent: dict[str, Any] | None = None,
    fill: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a run's folder, all at once; `fill` may add to it before it appears."""
    if out.exists():
        hint = f"`uptrain resume {out}` goes on with it" if (out / RUN).exists() else "choose another --out"
        raise InputError(f"{out} exists already; {hint}.")
    unfinished = out.parent / f".{out.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / MODEL).mkdir(parents=True)
    side_files, _ = list_files(config_folder)
    for name, content in {
        **side_files,
        "config.json": config_folder / "config.json",
        **_record_of(config_folder),
    }.items():
        target = unfinished / MODEL / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    run = Run(
        settings=s,
        budget=budget,
        cache_sha256=Cache.open(Path(s.data)).manifest.sha256,
        config_sha256=hashlib.sha256((config_folder / "config.json").read_bytes()).hexdigest(),
        versions={name: version(name) for name in ("groupwise", "torch", "accelerate", "transformers")},
        parent=parent,
    )
    fill(unfinished)
    (unfinished / RUN).write_bytes(json_text(asdict(run)))
    sync_file(unfinished / RUN)
    sync_folder(unfinished)
    unfinished.rename(out)
    sync_folder(out.parent)


def _record_of(folder: Path) -> dict[str, Path]:
    path = folder / "groupwise.json"
    return {path.name: path} if path.is_file() else {}


def execute(folder: Path, accelerator: Accelerator, found: Found | None, deadline: float, show: Show) -> str:
    """Train a run from a checkpoint, or from its beginning; return its status as run_state.json then has it.

    Raises InputError for what does not fit together; Halted, SaveError and others as the loop does.
    """
    run = Run.read(folder)
    training = build(folder, run, accelerator, found, deadline, show)
    progress = Progress()
    if found is not None:
        load(found.folder, training.trainee, training.optimizer)
        progress = Progress(**{name: found.state[name] for name in vars(progress)})
        training.saved_step = progress.step
    if accelerator.is_main_process:
        _announce(training, progress, found)
        _write_state(folder, "running", progress.step)
    try:
        reason = train(training, progress)
    except Halted as error:
        _end(accelerator, folder, "halted", progress.step, str(error))
        raise
    status = "finished" if reason == "finished" else "preempted"
    _end(accelerator, folder, status, progress.step, reason)
    return status


def build(
    folder: Path, run: Run, accelerator: Accelerator, found: Found | None, deadline: float, show: Show
) -> Training:
    """Open data and models, and spread them over the processes."""
    s = run.settings
    cache, eval_cache = open_caches(run)
    student = _student(folder, s, found)
    check_vocabulary(cache, student.head_weight.shape[0], s.data)
    choose_trainable(student, s.trainable)
    layers = blocks(student)
    if s.activation_checkpointing:
        recompute_activations(layers)
    if s.compile:
        for layer in layers:
            layer.compile()
    teacher = None
    if s.teacher:
        teacher = load_teacher(Path(s.teacher), s.precision, accelerator.device)
        check_teacher(student.head_weight.shape[0], teacher.head_weight.shape[0], s.teacher)
        shard_teacher(accelerator, blocks(teacher))
    trainee = Trainee(student, s.loss, teacher)
    optimizer = make_optimizer(s.optimizer, trainee, s.weight_decay)
    trainee, optimizer = accelerator.prepare(trainee, optimizer)
    checkpoints = Checkpoints(folder / CHECKPOINTS, accelerator, s.keep_last)
    checkpoints.sweep()
    if s.track:
        accelerator.init_trackers(folder.name, config={k: v for k, v in asdict(s).items() if k != "track"})
    return Training(
        trainee=trainee, optimizer=optimizer.optimizer, accelerator=accelerator, cache=cache,
        schedule=schedule_of(s), checkpoints=checkpoints, metrics=Metrics(folder / METRICS), stop_request=stop_request,
        global_batch=s.global_batch, micro_batch=s.micro_batch, seed=s.seed, save_every=s.save_every,
        eval_cache=eval_cache, eval_every=s.eval_every, spike_sigma=s.spike_sigma, deadline=deadline, show=show,
    )  # fmt: skip


def _student(folder: Path, s: Settings, found: Found | None) -> Any:
    if found is not None:
        return empty_student(folder / MODEL)
    return load_student(Path(s.model)) if s.model else random_student(folder / MODEL, s.seed)


def open_caches(run: Run) -> tuple[Cache, Cache | None]:
    """Open the run's data; it must be what the run began with."""
    s = run.settings
    cache = Cache.open(Path(s.data))
    if cache.manifest.sha256 != run.cache_sha256:
        raise InputError(
            f"{s.data} holds other data than when the run began (sha256 {cache.manifest.sha256[:12]}, then "
            f"{run.cache_sha256[:12]}); bring that cache back, or start a new run."
        )
    return cache, Cache.open(Path(s.eval_data)) if s.eval_data else None


def _announce(training: Training, progress: Progress, found: Found | None) -> None:
    """Write down that the run begins or goes on, and tell the world that signals are heeded from now on."""
    training.metrics.rewind(progress.step)
    event: dict[str, Any] = {"step": progress.step, "event": "resumed" if found else "started"}
    event |= {"time": time.time(), "processes": training.accelerator.num_processes, "threads": torch.get_num_threads()}
    if found and found.passed_over:
        event["passed_over"] = list(found.passed_over)
    training.metrics.write(event)
    training.show(event)


def _end(accelerator: Accelerator, folder: Path, status: str, step: int, reason: str) -> None:
    if accelerator.is_main_process:
        _write_state(folder, status, step, reason)
    accelerator.end_training()


def _write_state(folder: Path, status: str, step: int, reason: str = "") -> None:
    path = folder / STATE
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(json_text({"status": status, "step": step, "reason": reason, "pid": os.getpid()}))
    sync_file(temporary)
    temporary.replace(path)
