"""A run: its folder, and the way from settings to a training under way.

RUN/run.json              settings, budget, identities of data and model, versions
RUN/model/                the model's config and tokenizer files, as they were: what resuming and exporting need
RUN/checkpoints/          see `uptrain.checkpoints.save_load`
RUN/metrics.jsonl         see `uptrain.runs.metrics_log`
RUN/run_state.json        {"status": "running" | "preempted" | "finished" | "halted" | "failed", "step": …}
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from accelerate import Accelerator

from model.checkpoint.hf_folder import json_text, list_files
from model.common.errors import InputError, RankError, RunError
from model.common.files import copy_file, replace_file, sync_tree, write_file
from model.common.staging import Staging, check_out
from uptrain.budget.schedule import Schedule
from uptrain.checkpoints.save_load import Checkpoints, SaveError, VerifiedCheckpoint, load
from uptrain.data.run_data import find_data
from uptrain.data.token_cache import Cache
from uptrain.distributed.accelerator import make_accelerator
from uptrain.distributed.collectives import is_lost_process, on_main
from uptrain.distributed.fsdp import broadcast_weights, load_on_main, place_teacher
from uptrain.runs.checks import check_batch, check_exportable, check_packing, check_teacher, check_vocabulary
from uptrain.runs.fingerprints import check_same, identities
from uptrain.runs.folder import CHECKPOINTS, METRICS, MODEL, RUN, STATE, Run, locked
from uptrain.runs.metrics_log import Metrics
from uptrain.runs.progress import ProgressSink
from uptrain.runs.settings import Settings
from uptrain.runs.signals import stop_request
from uptrain.training.language_model import LanguageModel
from uptrain.training.loop import NonFiniteGradientsError, RunState, Training, train
from uptrain.training.models import (
    block_names,
    compile_layers,
    empty_student,
    empty_teacher,
    load_student,
    load_teacher,
    parameter_names,
    random_student,
    recompute_activations,
)
from uptrain.training.module import STUDENT, LossModule, blocks, choose_trainable, has_finite_weights
from uptrain.training.optimizer import make_optimizer


def schedule_of(s: Settings) -> Schedule:
    return Schedule(s.schedule, s.lr, s.steps, s.warmup_steps, s.decay_fraction, s.original_steps)


def start(
    s: Settings, budget: dict[str, Any], config_folder: Path, out: Path, deadline: float, show: ProgressSink
) -> str:
    """Make the folder of a new run once everything given is open and fits, and train; return how it ended.

    `config_folder` has the config and tokenizer: the model's folder, or that of a model to be trained from nothing.
    """
    accelerator = make_accelerator(s.precision, block_names(config_folder), s.track, out)
    check_batch(s.global_batch, accelerator.num_processes)
    on_main(accelerator, lambda: refuse_existing(out))
    training = build_first(s, config_folder, accelerator, out, deadline, show)
    on_main(accelerator, lambda: make_folder(s, budget, identities(s), config_folder, out))
    with _alone(accelerator, out):
        return execute(out, s, training, RunState(), None)


def resume(folder: Path, deadline: float, show: ProgressSink) -> str:
    """Train on from the newest whole checkpoint, with any number of processes; from the beginning if there is none."""
    run = Run.read(folder)
    s = find_data(run.settings, folder)
    accelerator = make_accelerator(s.precision, block_names(folder / MODEL), s.track, folder)
    check_batch(s.global_batch, accelerator.num_processes)
    check_same_data(s.data, run.cache_sha256)
    with _alone(accelerator, folder):
        found = Checkpoints(folder / CHECKPOINTS, accelerator, s.keep_last).newest()
        on_main(accelerator, lambda: check_same(s, run.identities, with_model=found is None))
        if found is None:
            training = build_first(s, folder / MODEL, accelerator, folder, deadline, show)
            return execute(folder, s, training, RunState(), None)
        training = build(s, empty_student(folder / MODEL), accelerator, folder, deadline, show)
        load(found.folder, training.trainee, training.optimizer)
        if not has_finite_weights(training.trainee, accelerator):
            raise InputError(f"{found.folder} holds weights that are NaN or infinite; remove it to use an older one.")
        progress = RunState(**{name: found.state[name] for name in vars(RunState())})
        training.saved_step, training.rotation_is_due = progress.step, True
        return execute(folder, s, training, progress, found)


@contextmanager
def _alone(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Refuse to train in a folder where others train; the main process looks for all."""
    with ExitStack() as locks:
        on_main(accelerator, lambda: locks.enter_context(locked(folder)))
        yield


def make_folder(
    s: Settings,
    budget: dict[str, Any],
    identities: dict[str, str],
    config_folder: Path,
    out: Path,
    parent: dict[str, Any] | None = None,
    fill: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a run's folder, all at once; `fill` may add to it before it appears."""
    refuse_existing(out)
    side_files, _ = list_files(config_folder)
    files = {**side_files, "config.json": config_folder / "config.json", **_record_of(config_folder)}
    run = Run(
        settings=s,
        budget=budget,
        cache_sha256=Cache.open(Path(s.data)).manifest.sha256,
        identities=identities,
        versions={name: version(name) for name in ("groupwise", "torch", "accelerate", "transformers")},
        parent=parent,
    )
    with Staging(out.resolve()) as staging:
        staging.open(uuid4().hex)  # an interrupted start begins anew: this is soon done
        try:
            for name, content in files.items():
                copy_file(content, staging.folder / MODEL / name)
            fill(staging.folder)
            write_file(staging.folder / RUN, json_text(asdict(run)))
            sync_tree(staging.folder)
            staging.publish()
        except BaseException:
            staging.discard()
            raise


def refuse_existing(out: Path) -> None:
    """Raise InputError if there is something where a run is to be made, or nothing can be."""
    check_out(out)
    if out.exists():
        hint = f"`uptrain resume {out}` goes on with it" if (out / RUN).exists() else "choose another --out"
        raise InputError(f"{out} exists already; {hint}.")


def _record_of(folder: Path) -> dict[str, Path]:
    path = folder / "groupwise.json"
    return {path.name: path} if path.is_file() else {}


def execute(folder: Path, s: Settings, training: Training, progress: RunState, found: VerifiedCheckpoint | None) -> str:
    """Train a run from where `progress` stands; return its status as run_state.json then has it.

    Raises Halted as the loop does, and Failure if the last checkpoint could not be written.
    """
    accelerator = training.accelerator
    training.checkpoints.clean_up()
    if s.track:
        accelerator.init_trackers(folder.name, config={k: v for k, v in asdict(s).items() if k != "track"})
    if accelerator.is_main_process:
        _announce(training, progress, found)
        _write_state(folder, "running", progress.step)
    try:
        reason = train(training, progress)
    except Exception as error:
        failure = _explain(error, folder, progress.step, accelerator)
        if accelerator.is_main_process:
            _write_state(
                folder,
                "halted" if isinstance(error, NonFiniteGradientsError) else "failed",
                progress.step,
                str(failure),
            )
        if failure is error:
            raise
        raise failure from error
    status = "finished" if reason == "finished" else "preempted"
    if accelerator.is_main_process:
        training.metrics.flush()
        _write_state(folder, status, progress.step, reason)
    for tracker in accelerator.trackers:
        tracker.finish()
    return status


def _explain(error: Exception, folder: Path, step: int, accelerator: Accelerator) -> Exception:
    """Return an error as one line for the user if it is no error of the program's, else as it is.

    What the processes agreed on, as that a save failed, the main one says for all. Any other is one process' own.
    """
    hint = f"`uptrain resume {folder}` goes on from the newest checkpoint"
    if isinstance(error, SaveError):
        return RunError(f"step {step}, where the run ends, could not be saved: {error}. Put that right, then {hint}.")
    if is_lost_process(error):
        said = " ".join(str(error).split())
        return RunError(f"after step {step}, another process cannot be reached; {hint}. It may have ended: {said}")
    if accelerator.num_processes > 1 and isinstance(error, (InputError, OSError)):
        return RankError(
            f"process {accelerator.process_index}, after step {step}: {error}. Put that right, then {hint}."
        )
    return error


def build_first(
    s: Settings, config_folder: Path, accelerator: Accelerator, folder: Path, deadline: float, show: ProgressSink
) -> Training:
    """Build a training with the weights that a run begins with."""
    student, weights = load_on_main(
        accelerator, lambda: first_student(s, config_folder), lambda: empty_student(config_folder)
    )
    training = build(s, student, accelerator, folder, deadline, show)
    broadcast_weights(accelerator, training.trainee, {STUDENT + name: tensor for name, tensor in weights.items()})
    return training


def build(
    s: Settings, student: LanguageModel, accelerator: Accelerator, folder: Path, deadline: float, show: ProgressSink
) -> Training:
    """Open data and teacher, and spread the models over the processes. Writes nothing into the run's folder.

    Raises InputError for what does not fit together.
    """
    cache = Cache.open(Path(s.data))
    eval_cache = Cache.open(Path(s.eval_data)) if s.eval_data else None
    for opened in filter(None, (cache, eval_cache)):
        check_vocabulary(opened, student.head_weight.shape[0], str(opened.folder))
        check_packing(student, opened.seq_len)
    choose_trainable(student, s.trainable)
    layers = blocks(student)
    if s.activation_checkpointing:
        recompute_activations(layers)
    if s.compile:
        compile_layers(layers)
    teacher = None
    if s.teacher:
        path = Path(s.teacher)
        read, empty = (partial(make, path, s.precision) for make in (load_teacher, empty_teacher))
        teacher, weights = load_on_main(accelerator, read, empty)
        check_teacher(student.head_weight.shape[0], teacher.head_weight.shape[0], s.teacher)
        check_packing(teacher, cache.seq_len)
        place_teacher(accelerator, teacher, blocks(teacher))
        broadcast_weights(accelerator, teacher, weights)
    trainee = LossModule(student, s.loss, teacher)
    optimizer = make_optimizer(s.optimizer, trainee, s.weight_decay)
    trainee, optimizer = accelerator.prepare(trainee, optimizer)
    return Training(
        trainee=trainee, optimizer=optimizer.optimizer, accelerator=accelerator, cache=cache,
        schedule=schedule_of(s), checkpoints=Checkpoints(folder / CHECKPOINTS, accelerator, s.keep_last),
        metrics=Metrics(folder / METRICS), stop_request=stop_request,
        global_batch=s.global_batch, micro_batch=s.micro_batch, seed=s.seed, save_every=s.save_every,
        eval_cache=eval_cache, eval_every=s.eval_every, spike_sigma=s.spike_sigma, deadline=deadline, show=show,
    )  # fmt: skip


def first_student(s: Settings, config_folder: Path) -> LanguageModel:
    """Return the model that a run begins with."""
    if not s.model:
        return random_student(config_folder, s.seed)
    model = Path(s.model)
    check_exportable(model, *parameter_names(model))
    return load_student(model)


def check_same_data(data: str, sha256: str) -> None:
    """Refuse to go on with other data than the run began with."""
    found = Cache.open(Path(data)).manifest.sha256
    if found != sha256:
        raise InputError(
            f"{data} holds other data than when the run began (sha256 {found[:12]}, then {sha256[:12]}); "
            "bring that cache back, or start a new run."
        )


def _announce(training: Training, progress: RunState, found: VerifiedCheckpoint | None) -> None:
    """Write down that the run begins or goes on, and tell the world that signals are heeded from now on."""
    training.metrics.rewind(progress.step)
    event: dict[str, Any] = {"step": progress.step, "event": "resumed" if found else "started"}
    accelerator = training.accelerator
    event |= {"time": time.time(), "processes": accelerator.num_processes, "threads": torch.get_num_threads()}
    event["device"] = accelerator.device.type
    if found and found.rejected:
        event["passed_over"] = list(found.rejected)
    training.metrics.write(event)
    training.show(event)


def _write_state(folder: Path, status: str, step: int, reason: str = "") -> None:
    replace_file(folder / STATE, json_text({"status": status, "step": step, "reason": reason, "pid": os.getpid()}))
