"""Start and resume runs: make the run's folder, build what it trains, and train.

RUN/run.json              settings, budget, fingerprints of data and models, versions
RUN/model/                copies of the model's config and tokenizer files, for resuming and exporting
RUN/checkpoints/          see `uptrain.checkpoints.store`
RUN/metrics.jsonl         see `uptrain.training.metrics_log`
RUN/run_state.json        {"status": "running" | "preempted" | "finished" | "halted" | "failed", "step": …}
"""

import hashlib
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from model.common.console import echo, format_bytes, warn
from model.common.counts import counted, format_count
from model.common.errors import InputError
from model.common.processes import pid_namespace, process_start
from model.common.typed_json import json_bytes
from model.decoder.devices import fast_float32_matmul
from model.files.lock import FileLock, LockLostError
from model.files.names import CHECKPOINTS, RUN_JSON
from model.files.write import replace_file
from uptrain.budget.budget import Budget
from uptrain.checkpoints.files import FREE_SPACE_FACTOR, checkpoints_on_disk, list_checkpoints
from uptrain.checkpoints.store import CheckpointStore, VerifiedCheckpoint
from uptrain.checkpoints.tensors import read_tensors
from uptrain.distributed.accelerator import check_replicas, emulates_bfloat16, make_accelerator
from uptrain.distributed.collectives import all_gather, on_main
from uptrain.estimates.memory import MASTER_BYTES, state_bytes
from uptrain.models.checks import has_finite_weights
from uptrain.models.load import uninitialized_student
from uptrain.runs.build import RunContext, build, build_initial
from uptrain.runs.checks import check_batch, check_layer_names
from uptrain.runs.explain_errors import device_errors_as_run_error, explain_error
from uptrain.runs.fingerprints import check_same, check_same_data, run_fingerprints
from uptrain.runs.make_folder import make_folder, refuse_existing
from uptrain.runs.progress import ProgressSink, without_errors
from uptrain.runs.resolve_settings import find_data
from uptrain.runs.run_folder import MODEL, RUN_STATE, Run, locked, read_run_state
from uptrain.runs.settings import Settings
from uptrain.training.loop import (
    NO_STEP,
    RunHaltedError,
    Training,
    TrainingProgress,
    log_tracker_failures,
    train,
)
from uptrain.training.losses import LOSSES
from uptrain.training.trackers import finish_trackers, start_trackers

FINISHED_BEFORE = "finished before"
"""The status that `resume` returns of a run that has nothing left to do."""


def start(
    settings: Settings, budget: Budget, config_folder: Path, out: Path, deadline: float, show: ProgressSink
) -> str:
    """Check and load all inputs, make the folder of a new run, and train; return the status at the end.

    `config_folder` holds the config and tokenizer: the folder of the model, or of `--init`.
    """
    layers = check_layer_names(config_folder, settings)
    accelerator = make_accelerator(settings.precision, layers, settings.track, out)
    check_replicas(accelerator)
    check_batch(settings.global_batch, accelerator.num_processes)
    # Each process chose the default by its own device. All must take as many windows at a time.
    settings = replace(settings, micro_batch=min(all_gather(accelerator, settings.micro_batch)))
    on_main(accelerator, lambda: refuse_existing(out))
    lock = _RunLock(accelerator, out)
    checkpoints = CheckpointStore(out / CHECKPOINTS, accelerator, settings.keep_last, settings.save_every, lock.check)
    context = RunContext(accelerator, out, checkpoints, deadline, without_errors(show))
    with device_errors_as_run_error(accelerator):
        training = build_initial(settings, config_folder, context)
    teacher = accelerator.unwrap_model(training.loss_module).teacher
    for folder, model in ((settings.model, training.loss_module), (settings.teacher, teacher)):
        if model is not None and not has_finite_weights(model, accelerator):
            raise InputError(f"weights of {folder} are NaN or infinite; the checkpoint is damaged.")
    on_main(accelerator, lambda: make_folder(settings, budget, run_fingerprints(settings), config_folder, out))
    with lock.held():
        return train_run(out, settings, training, TrainingProgress(), None)


def resume(folder: Path, changes: dict[str, Any], deadline: float, show: ProgressSink) -> str:
    """Resume at the newest intact checkpoint, with any world size; restart at step 0 if there is none.

    `changes`: settings that differ from now on, which run.json then has. Of a finished run whose last checkpoint is
    intact, no model is built and nothing is written: return FINISHED_BEFORE.
    """
    run = Run.read(folder)
    run = replace(run, settings=replace(run.settings, **changes))
    settings = find_data(run.settings, folder)
    layers = check_layer_names(folder / MODEL, settings)
    accelerator = make_accelerator(settings.precision, layers, settings.track, folder)
    check_replicas(accelerator)
    check_batch(settings.global_batch, accelerator.num_processes, is_new=False)
    check_same_data(run, settings.data)
    lock = _RunLock(accelerator, folder)
    with lock.held():
        checkpoints = CheckpointStore(
            folder / CHECKPOINTS, accelerator, settings.keep_last, settings.save_every, lock.check
        )
        checkpoint = checkpoints.newest()
        if checkpoint is not None and checkpoint.state["step"] > settings.steps:
            raise InputError(
                f"{checkpoint.folder} is beyond the run's {settings.steps} steps; {RUN_JSON} is that of another run."
            )
        is_at_end = checkpoint is not None and checkpoint.state["step"] == settings.steps
        if is_at_end and on_main(accelerator, lambda: _is_finished(folder)):
            return FINISHED_BEFORE
        if changes:
            on_main(accelerator, lambda: replace_file(folder / RUN_JSON, json_bytes(asdict(run))))
        reads_model = checkpoint is None or settings.trainable != "all"
        on_main(accelerator, lambda: check_same(settings, run.fingerprints, with_model=checkpoint is None))
        saved_step = NO_STEP if checkpoint is None else checkpoint.state["step"]
        context = RunContext(accelerator, folder, checkpoints, deadline, without_errors(show))
        with device_errors_as_run_error(accelerator):
            if reads_model:
                training = build_initial(settings, folder / MODEL, context, saved_step)
            else:
                training = build(settings, uninitialized_student(folder / MODEL), context, saved_step)
            if checkpoint is not None:
                read_tensors(checkpoint.folder, training.loss_module, training.optimizer)
                if not has_finite_weights(training.loss_module, accelerator):
                    raise InputError(
                        f"{checkpoint.folder} holds weights that are NaN or infinite; remove it to use an older one."
                    )
        if checkpoint is None:
            return train_run(folder, settings, training, TrainingProgress(), None)
        progress = TrainingProgress(**{name: checkpoint.state[name] for name in vars(TrainingProgress())})
        return train_run(folder, settings, training, progress, checkpoint)


def _is_finished(folder: Path) -> bool:
    """Return whether a run at its last step has also evaluated, which one that was stopped there has not."""
    try:
        return bool(read_run_state(folder / RUN_STATE).get("status") == "finished")
    except InputError:  # damaged; training writes it again
        return False


class _RunLock:
    """The lock of a run, which the main process holds against other trainings."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self._accelerator, self._folder = accelerator, folder
        self._file_lock: FileLock | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock in the block. Raises InputError on all ranks if another training runs there."""
        with ExitStack() as stack:
            on_main(self._accelerator, lambda: self._acquire(stack))
            yield

    def _acquire(self, stack: ExitStack) -> None:
        self._file_lock = stack.enter_context(locked(self._folder))

    def check(self) -> None:
        """Raise RunError on the main process if another training has taken the lock, see `FileLock.check`."""
        if self._file_lock is not None:
            self._file_lock.check()


def train_run(
    folder: Path,
    settings: Settings,
    training: Training,
    progress: TrainingProgress,
    checkpoint: VerifiedCheckpoint | None,
) -> str:
    """Train a run from `progress.step`; return the status that run_state.json then holds.

    Raises RunHaltedError like the loop, and RunError if the last checkpoint could not be written.
    """
    accelerator = training.accelerator
    training.checkpoints.clean_up()
    on_main(accelerator, lambda: _record_start(folder, settings, training, progress, checkpoint))
    if settings.track and accelerator.is_main_process:
        config = {name: value for name, value in asdict(settings).items() if name != "track"}
        failures = start_trackers(accelerator, folder, _run_id(folder), config, progress.step)
        log_tracker_failures(training, progress.step, failures)
    try:
        with fast_float32_matmul(accelerator.device.type):
            reason = train(training, progress)
    except Exception as error:
        failure = explain_error(error, folder, progress.step, accelerator)
        if accelerator.is_main_process and not isinstance(error, LockLostError):  # the run is another training's now
            status = "halted" if isinstance(error, RunHaltedError) else "failed"
            _write_last_run_state(folder, status, progress.step, str(failure))
        if failure is error:
            raise
        raise failure from error
    status = "finished" if reason == "finished" else "preempted"
    if accelerator.is_main_process:
        _write_last_run_state(folder, status, progress.step, reason)
        try:
            training.metrics.flush()
        except OSError as error:
            warn(f"the last lines of {training.metrics.path} were not written, but the run is saved: {error}")
    for problem in finish_trackers(accelerator):
        warn(f"the tracker did not finish, but the run did: {problem}")
    return status


def _run_id(folder: Path) -> str:
    """Return an id that the run keeps when it is resumed, unless its folder was moved, and no other run has."""
    made = (folder / MODEL).stat().st_mtime_ns
    return hashlib.sha256(f"{folder.resolve()} {made}".encode()).hexdigest()[:16]


def _disk_space_warning(folder: Path, settings: Settings, training: Training) -> str | None:
    """Return a warning if the disk lacks the room for the checkpoints that the run keeps, and one more."""
    shapes = [tuple(p.shape) for p in training.loss_module.parameters() if p.requires_grad]  # of all shards
    each = sum(MASTER_BYTES * math.prod(shape) + state_bytes(settings.optimizer, shape) for shape in shapes)
    at_once = checkpoints_on_disk(settings.keep_last, settings.save_every, settings.steps, settings.schedule)
    needed = each * max(FREE_SPACE_FACTOR, at_once - len(list_checkpoints(folder / CHECKPOINTS)))
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return (
        f"a checkpoint takes about {format_bytes(each)}, and the run needs up to {format_bytes(needed)} for those that "
        f"it keeps, but {format_bytes(free)} are free on the disk of {folder}; make room while it trains, or it cannot "
        f"be saved. It saves every {settings.save_every:,} steps, and an hour after the last save."
    )


def _record_start(
    folder: Path,
    settings: Settings,
    training: Training,
    progress: TrainingProgress,
    checkpoint: VerifiedCheckpoint | None,
) -> None:
    _log_start(settings, training, progress, checkpoint)
    if warning := _disk_space_warning(folder, settings, training):
        warn(warning)
    _write_run_state(folder, "running", progress.step)


def _log_start(
    settings: Settings, training: Training, progress: TrainingProgress, checkpoint: VerifiedCheckpoint | None
) -> None:
    """Log start or resume, and print READY: signals are handled from now on. First say what a new run does."""
    training.metrics.rewind(progress.step)
    event: dict[str, Any] = {"step": progress.step, "event": "resumed" if checkpoint else "started"}
    accelerator = training.accelerator
    event |= {"time": time.time(), "processes": accelerator.num_processes, "threads": torch.get_num_threads()}
    event["device"] = accelerator.device.type
    if training.shared_bytes:
        event["shared_bytes"] = training.shared_bytes
    if checkpoint and checkpoint.rejected:
        event["rejected"] = list(checkpoint.rejected)
    training.metrics.write(event)
    if not checkpoint:
        echo(_describe(settings, training), err=True)
    training.show(event)


def _describe(settings: Settings, training: Training) -> str:
    """Return a sentence on what a run trains, for how long and how."""
    accelerator = training.accelerator
    student = accelerator.unwrap_model(training.loss_module).student
    sizes = [(p.numel(), p.requires_grad) for p in student.parameters()]  # of all shards
    total = format_count(sum(n for n, _ in sizes))
    trained = format_count(sum(n for n, is_trained in sizes if is_trained))
    every_steps = f"every {settings.eval_every:,} steps" if settings.eval_every > 1 else "after every step"
    evaluated = f", held-out loss {every_steps}" if settings.eval_data else ""
    computes = ""
    if emulates_bfloat16(accelerator.device):
        how = "emulated bf16, which is slow" if settings.precision == "bf16" else settings.precision
        computes = f" The GPU has no bf16 of its own (before Ampere), so it computes in {how}."
    return (
        f"Training {settings.trainable}, {trained} of {total} parameters: {counted(settings.steps, 'step')} of "
        f"{settings.global_batch * training.cache.seq_len:,} tokens, peak learning rate {settings.lr:.3g}, loss: "
        f"{LOSSES[settings.loss]}{evaluated}.{computes}"
    )


def _write_run_state(folder: Path, status: str, step: int, reason: str = "") -> None:
    pid = os.getpid()
    state = {
        "status": status, "step": step, "reason": reason, "host": socket.gethostname(), "pid": pid,
        "started": process_start(pid), "pid_namespace": pid_namespace(),
    }  # fmt: skip
    replace_file(folder / RUN_STATE, json_bytes(state))


def _write_last_run_state(folder: Path, status: str, step: int, reason: str) -> None:
    """Write the status of a run that ends. Warn if that fails, so that the reason of its end is printed even so."""
    try:
        _write_run_state(folder, status, step, reason)
    except OSError as error:
        warn(f"{RUN_STATE} could not be written, and still says that the run is running: {error}")
