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
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from model.checkpoint.hf_folder import json_text
from model.common.console import echo, size, warn
from model.common.counts import counted, format_count
from model.common.errors import InputError, RankError, RunError, is_device_error, is_out_of_memory
from model.common.file_lock import FileLock
from model.common.file_names import RUN_JSON
from model.common.files import replace_file
from model.common.printable import one_line
from model.common.processes import pid_namespace, process_start
from model.decoder.devices import fast_float32_matmul
from uptrain.budget.budget import Budget
from uptrain.checkpoints.files import SPARE, list_checkpoints
from uptrain.checkpoints.store import CheckpointStore, VerifiedCheckpoint
from uptrain.checkpoints.tensors import SaveError, read_tensors
from uptrain.distributed.accelerator import check_replicas, emulates_bfloat16, make_accelerator
from uptrain.distributed.collectives import gather, is_lost_process, on_main
from uptrain.estimates.memory import MASTER_BYTES, state_bytes
from uptrain.models.load import uninitialized_student
from uptrain.runs.build import build, build_initial
from uptrain.runs.checks import check_batch, check_layer_names
from uptrain.runs.fingerprints import check_same, check_same_data, run_fingerprints
from uptrain.runs.folder import CHECKPOINTS, MODEL, RUN_STATE, Run, locked, read_run_state
from uptrain.runs.make_folder import make_folder, refuse_existing
from uptrain.runs.progress import ProgressSink, without_errors
from uptrain.runs.resolve_settings import find_data
from uptrain.runs.settings import Settings
from uptrain.training.loop import NonFiniteGradientsError, RunState, Training, log_tracker_failures, train
from uptrain.training.loss_module import has_finite_weights
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
    settings = replace(settings, micro_batch=min(gather(accelerator, settings.micro_batch)))
    on_main(accelerator, lambda: refuse_existing(out))
    checkpoints = CheckpointStore(out / CHECKPOINTS, accelerator, settings.keep_last)
    with _device_errors_as_run_error(accelerator):
        training = build_initial(settings, config_folder, accelerator, out, checkpoints)
    training.deadline, training.show = deadline, without_errors(show)
    teacher = accelerator.unwrap_model(training.loss_module).teacher
    for folder, model in ((settings.model, training.loss_module), (settings.teacher, teacher)):
        if model is not None and not has_finite_weights(model, accelerator):
            raise InputError(f"weights of {folder} are NaN or infinite; the checkpoint is damaged.")
    on_main(accelerator, lambda: make_folder(settings, budget, run_fingerprints(settings), config_folder, out))
    with _locked_on_main(accelerator, out) as check_lock:
        checkpoints.check_lock = check_lock
        return train_run(out, settings, training, RunState(), None)


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
    check_same_data(settings.data, run.cache_sha256)
    with _locked_on_main(accelerator, folder) as check_lock:
        checkpoints = CheckpointStore(folder / CHECKPOINTS, accelerator, settings.keep_last)
        checkpoint = checkpoints.newest()
        is_at_end = checkpoint is not None and checkpoint.state["step"] == settings.steps
        if is_at_end and on_main(accelerator, lambda: _is_finished(folder)):
            return FINISHED_BEFORE
        if changes:
            on_main(accelerator, lambda: replace_file(folder / RUN_JSON, json_text(asdict(run))))
        reads_model = checkpoint is None or settings.trainable != "all"
        on_main(accelerator, lambda: check_same(settings, run.identities, with_model=checkpoint is None))
        with _device_errors_as_run_error(accelerator):
            if reads_model:
                training = build_initial(settings, folder / MODEL, accelerator, folder, checkpoints)
            else:
                training = build(settings, uninitialized_student(folder / MODEL), accelerator, folder, checkpoints)
        training.deadline, training.show = deadline, without_errors(show)
        checkpoints.check_lock = check_lock
        if checkpoint is None:
            return train_run(folder, settings, training, RunState(), None)
        read_tensors(checkpoint.folder, training.loss_module, training.optimizer)
        if not has_finite_weights(training.loss_module, accelerator):
            raise InputError(
                f"{checkpoint.folder} holds weights that are NaN or infinite; remove it to use an older one."
            )
        state = RunState(**{name: checkpoint.state[name] for name in vars(RunState())})
        training.saved_step, training.rotation_is_due = state.step, True
        return train_run(folder, settings, training, state, checkpoint)


def _is_finished(folder: Path) -> bool:
    """Return whether a run at its last step has also evaluated, which one that was stopped there has not."""
    try:
        return bool(read_run_state(folder / RUN_STATE).get("status") == "finished")
    except InputError:  # damaged; training writes it again
        return False


@contextmanager
def _device_errors_as_run_error(accelerator: Accelerator) -> Iterator[None]:
    """Raise RunError, or RankError in one of many processes, if the models do not fit into memory or a GPU fails."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            text = (
                f"not enough memory ({_first_sentence(error)}) for the models; use devices with more, or more devices. "
                "`uptrain plan --memory` shows what fits."
            )
        elif is_device_error(error):
            text = f"the GPU failed ({_first_line(error)}) while models were read; try again, or use another device."
        else:
            raise
        raise _own_error(text, accelerator) from error


@contextmanager
def _locked_on_main(accelerator: Accelerator, folder: Path) -> Iterator[Callable[[], None]]:
    """Lock a run on the main process; yield a check, for that process, that it still holds the lock.

    Raises InputError on all ranks if another training runs there.
    """
    with ExitStack() as lock:
        locks: list[FileLock] = []
        on_main(accelerator, lambda: locks.append(lock.enter_context(locked(folder))))

        def check() -> None:
            for file_lock in locks:
                file_lock.check()

        yield check


def train_run(
    folder: Path, settings: Settings, training: Training, state: RunState, checkpoint: VerifiedCheckpoint | None
) -> str:
    """Train a run from `state.step`; return the status that run_state.json then holds.

    Raises NonFiniteGradientsError like the loop, and RunError if the last checkpoint could not be written.
    """
    accelerator = training.accelerator
    training.checkpoints.clean_up()
    on_main(accelerator, lambda: _record_start(folder, settings, training, state, checkpoint))
    if settings.track and accelerator.is_main_process:
        config = {name: value for name, value in asdict(settings).items() if name != "track"}
        log_tracker_failures(training, state.step, start_trackers(accelerator, folder, _run_id(folder), config))
    try:
        with fast_float32_matmul(accelerator.device.type):
            reason = train(training, state)
    except Exception as error:
        failure = _explain(error, folder, state.step, accelerator)
        if accelerator.is_main_process:
            status = "halted" if isinstance(error, NonFiniteGradientsError) else "failed"
            _write_last_run_state(folder, status, state.step, str(failure))
        if failure is error:
            raise
        raise failure from error
    status = "finished" if reason == "finished" else "preempted"
    if accelerator.is_main_process:
        _write_last_run_state(folder, status, state.step, reason)
        try:
            training.metrics.flush()
        except OSError as error:
            warn(f"the last lines of {training.metrics.path} were not written, but the run is saved: {error}")
    for problem in finish_trackers(accelerator):
        warn(f"the tracker did not finish, but the run did: {problem}")
    return status


def _run_id(folder: Path) -> str:
    """Return an id that the run keeps when it is resumed, and no other run has."""
    made = (folder / MODEL).stat().st_mtime_ns
    return hashlib.sha256(f"{folder.resolve()} {made}".encode()).hexdigest()[:16]


def _disk_space_warning(folder: Path, settings: Settings, training: Training) -> str | None:
    """Return a warning if the disk lacks the room for the checkpoints that the run keeps, and one more."""
    shapes = [tuple(p.shape) for p in training.loss_module.parameters() if p.requires_grad]  # of all shards
    each = sum(MASTER_BYTES * math.prod(shape) + state_bytes(settings.optimizer, shape) for shape in shapes)
    others = min(settings.keep_last, (settings.steps - 1) // settings.save_every) + (settings.schedule == "wsd")
    needed = each * (max(0, others - len(list_checkpoints(folder / CHECKPOINTS))) + SPARE)
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return (
        f"a checkpoint takes about {size(each)}, and the run needs {size(needed)} for those that it keeps, but "
        f"{size(free)} are free on the disk of {folder}; make room while it trains, or it cannot be saved. It saves "
        f"every {settings.save_every:,} steps."
    )


def _explain(error: Exception, folder: Path, step: int, accelerator: Accelerator) -> Exception:
    """Return a RunError of one line in place of an error that the user can resolve; return any other error unchanged.

    An error that all ranks share, such as a failed save, becomes a RunError, which the main process reports. An error
    of one rank becomes a RankError.
    """
    hint = f"`uptrain resume {shlex.quote(str(folder))}` {_resumed_at(folder)}"
    if isinstance(error, SaveError):
        return RunError(f"step {step}, where the run ends, could not be saved: {error}. Fix that, then {hint}.")
    if is_out_of_memory(error):
        text = (
            f"after step {step}, memory ran out ({_first_sentence(error)}). {hint}, also with a smaller --micro-batch "
            "or --activation-checkpointing; `uptrain plan --memory` shows what fits."
        )
        return _own_error(text, accelerator)
    if is_device_error(error):
        text = (
            f"after step {step}, the GPU failed ({_first_line(error)}). {hint}; if it fails again, on another device."
        )
        return _own_error(text, accelerator)
    if is_lost_process(error):
        message = _first_sentence(error)
        return RunError(f"after step {step}, another process cannot be reached; {hint}. It may have ended: {message}.")
    if isinstance(error, (InputError, OSError)):
        return _own_error(f"after step {step}: {str(error).rstrip('.')}. Fix that, then {hint}.", accelerator)
    return error


def _first_sentence(error: Exception) -> str:
    return one_line(str(error)).partition(". ")[0]


def _first_line(error: Exception) -> str:
    """Return what failed, without CUDA's advice on how to debug it."""
    return one_line(str(error).strip().partition("\n")[0])


def _own_error(text: str, accelerator: Accelerator) -> RunError:
    """Return the error of one process: if it is one of many, a RankError, which that process prints itself."""
    is_one_of_many = accelerator.num_processes > 1
    return RankError(f"process {accelerator.process_index}, {text}") if is_one_of_many else RunError(text)


def _resumed_at(folder: Path) -> str:
    try:
        is_saved = bool(list_checkpoints(folder / CHECKPOINTS))
    except OSError:  # it must not hide the error to explain
        is_saved = True
    return "continues from the newest checkpoint" if is_saved else "starts at step 0 (no checkpoint was saved)"


def _record_start(
    folder: Path, settings: Settings, training: Training, state: RunState, checkpoint: VerifiedCheckpoint | None
) -> None:
    _log_start(settings, training, state, checkpoint)
    if warning := _disk_space_warning(folder, settings, training):
        warn(warning)
    _write_run_state(folder, "running", state.step)


def _log_start(settings: Settings, training: Training, state: RunState, checkpoint: VerifiedCheckpoint | None) -> None:
    """Log start or resume, and print READY: signals are handled from now on. First say what a new run does."""
    training.metrics.rewind(state.step)
    event: dict[str, Any] = {"step": state.step, "event": "resumed" if checkpoint else "started"}
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
    trained, total = (format_count(sum(n for n, counts in sizes if counts or every)) for every in (False, True))
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
    replace_file(folder / RUN_STATE, json_text(state))


def _write_last_run_state(folder: Path, status: str, step: int, reason: str) -> None:
    """Write the state of a run that ends. Warn if that fails, so that the reason of its end is printed even so."""
    try:
        _write_run_state(folder, status, step, reason)
    except OSError as error:
        warn(f"{RUN_STATE} could not be written, and still says that the run is running: {error}")
