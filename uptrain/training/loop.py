"""Run the training loop: steps, evaluations, checkpoints and stop requests.

Learning rate, windows and loss scale are pure functions of the step and the global batch. A run can therefore stop
anywhere and resume with another world size without changing its result.

The loop waits for the device once in a step: it fetches loss and gradient norm after it has queued the update (before
it, if the optimizer cannot skip an update on the device). In a long step it also looks for signals, STOP_CHECKS times.
Meanwhile the next batch is read and copied. (The models wait too, where they find the documents of a micro-batch, and
Adafactor twice for each parameter.)
"""

import time
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model.common.errors import RunError
from uptrain.checkpoints.files import list_checkpoints
from uptrain.checkpoints.store import CheckpointStore
from uptrain.checkpoints.tensors import SaveError
from uptrain.data.batch import Batch, batches_of_steps, one_ahead
from uptrain.data.order import windows_of_step
from uptrain.data.teacher_logits import TeacherLogits
from uptrain.data.token_cache import Integers, TokenCache
from uptrain.distributed.collectives import all_gather, all_reduce_max, all_reduce_sum
from uptrain.distributed.fsdp import is_sharded
from uptrain.distributed.signals import StopRequest
from uptrain.models.checks import has_finite_weights
from uptrain.training.evaluate import EvaluationStopped, evaluate
from uptrain.training.learning_rate import Schedule, decay_start, learning_rate
from uptrain.training.metrics_log import Metrics
from uptrain.training.optimizer import applied_rate, can_skip_on_device, set_learning_rate, step_unless
from uptrain.training.spikes import SpikeDetector
from uptrain.training.trackers import log_to_trackers

CLIP = 1.0
HALT_COUNT, HALT_WINDOW = 3, 100
SAVE_SECONDS = 3600.0
"""A run is saved after this time at the latest, however many steps lie between checkpoints: it may end at any time."""

SPIKES_IN_A_ROW = 8
"""The run notes each time that it has left out so many updates in a row."""

NO_STEP = -1
"""The step of the newest checkpoint if there is none."""

STOP_CHECKS = 8
"""How often a long step, of at least twice as many micro-batches, looks for signals. Each time waits for the device."""


@dataclass
class TrainingProgress:
    """Progress of a run: the content of a checkpoint besides its tensors."""

    step: int = 0
    """Finished steps."""
    tokens: int = 0
    skipped: list[int] = field(default_factory=list)
    """Steps, counted from 1, whose update was skipped because the gradient was not finite or a spike."""
    not_finite: list[int] = field(default_factory=list)
    """The skipped steps whose gradient was not finite."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the last steps, of a SpikeDetector."""


@dataclass
class Training:
    """Objects and settings of the training loop."""

    loss_module: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    cache: TokenCache
    schedule: Schedule
    checkpoints: CheckpointStore
    metrics: Metrics
    stop_request: StopRequest
    deadline: float
    """`time.monotonic()` at which to stop."""
    show: Callable[[dict[str, Any]], None]
    """Called with each record of `metrics`, with an event if these wait for room on the disk, and during evaluations
    with `step`, and `evaluated` windows `of` all."""
    global_batch: int
    """Windows of one optimizer step, over all processes."""
    micro_batch: int
    """Windows per forward pass of one process."""
    seed: int
    save_every: int
    eval_cache: TokenCache | None
    eval_every: int
    spike_sigma: float | None
    logits: TeacherLogits | None = None
    """The teacher's logits of `cache`, in place of the teacher."""
    shared_bytes: int = 0
    """Bytes of frozen parameters that the student shares with the teacher."""
    saved_step: int = NO_STEP
    """Step of the newest checkpoint."""
    save_tried_at: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when a checkpoint was last written, whether that succeeded or not, or the run was built."""
    rotation_is_due: bool = False
    """Whether to remove older checkpoints once a finite gradient confirms the weights of the newest one."""


class _StepAbandonedError(Exception):
    """A process was asked to stop between two micro-batches of a long step. Nothing has been updated yet."""


@dataclass(frozen=True)
class _Due:
    """What is due after a step, because any process wants it. All processes agree on it."""

    stop: bool = False
    save: bool = False


class RunHaltedError(RunError):
    """The run is halted: weights, or too many gradients, are not finite."""


def train(training: Training, progress: TrainingProgress) -> str:
    """Train from `progress.step`; return "finished", or the reason for an earlier stop.

    Raises RunHaltedError in three cases. If 3 of 100 gradients were not finite, the state is saved first. If
    those 3 were consecutive, or if weights are not finite, nothing is saved. Raises SaveError if the last save failed.
    """
    training.loss_module.train()
    _join_buckets(training)
    steps = range(progress.step, training.schedule.total_steps)
    with closing(_batches(training, steps)) as batches:
        for step in steps:
            if (reason := _evaluate_if_due(training, step)) is not None:
                return _stop(training, progress, reason)
            try:
                due = _train_step(training, progress, step, batches)
            except _StepAbandonedError:
                _zero_gradients(training)
                due = _Due(stop=True)
            if due.stop:
                return _stop(training, progress, _reason(training))
            if due.save or progress.step % training.save_every == 0 or progress.step == decay_start(training.schedule):
                _try_to_save(training, progress)
    if training.eval_cache is not None:  # it may take long, and a run that is killed in it has made its last step
        _try_to_save(training, progress)
    if (reason := _evaluate_if_due(training, training.schedule.total_steps)) is not None:
        return _stop(training, progress, reason)
    _save(training, progress)  # unless that has just succeeded
    _rotate_if_due(training)
    return "finished"


def _join_buckets(training: Training) -> None:
    """Make gradients views of DDP's buckets, by the backward pass of a batch without targets: they are 0.

    DDP does so at the first pass that it reduces, the last of a step. The other passes of the first step would
    accumulate beside the buckets, and need the memory of all gradients once more.
    """
    if isinstance(training.loss_module, DistributedDataParallel):
        top_k = training.logits.manifest.top_k if training.logits else 0
        n_rows = min(training.micro_batch, training.global_batch // training.accelerator.num_processes)
        # As many rows as the first batch has: for another number, layers would be compiled again.
        batch = Batch.without_targets(training.cache.seq_len, training.accelerator.device, n_rows, top_k)
        top = batch.top and batch.top.as_inputs()
        loss = training.loss_module(batch.ids_BT, batch.labels_BT, batch.documents_BT, top=top)
        training.accelerator.backward(loss)


def _own_windows(training: Training) -> slice:
    """Return the place of this process's windows among those of a step."""
    rank, world_size = training.accelerator.process_index, training.accelerator.num_processes
    return slice(rank * training.global_batch // world_size, (rank + 1) * training.global_batch // world_size)


def _batches(training: Training, steps: range) -> Generator[Batch]:
    """Yield this process's micro-batches of some steps, each read and copied while the one before is used."""
    batches = batches_of_steps(
        steps,
        training.global_batch,
        training.seed,
        _own_windows(training),
        training.cache,
        training.micro_batch,
        training.accelerator.device,
        training.logits,
    )
    return one_ahead(batches)


def _train_step(training: Training, progress: TrainingProgress, step: int, batches: Iterator[Batch]) -> _Due:
    """Make and record one step; return what is due after it."""
    started = time.perf_counter()
    # For a class of transformers that draws random numbers in training. NumPy guarantees the stream of a SeedSequence.
    entropy = (training.seed, step, training.accelerator.process_index)
    torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
    windows = windows_of_step(step, training.cache.n_windows, training.global_batch, training.seed)
    n_targets = max(1, training.cache.n_targets(windows))  # without targets, loss and gradient are 0
    rate = learning_rate(training.schedule, step)
    set_learning_rate(training.optimizer, rate)
    rate = applied_rate(training.optimizer, rate, step + 1 - len(progress.skipped))
    n_batches = -(-len(windows[_own_windows(training)]) // training.micro_batch)
    device_loss = _backward(training, islice(batches, n_batches), n_batches, n_targets)
    device_norm = _clip(training)
    spikes = SpikeDetector(training.spike_sigma, progress.grad_norms)
    queued = can_skip_on_device(training.optimizer)
    if queued:
        step_unless(training.optimizer, ~device_norm.isfinite() | (device_norm > spikes.limit()))
    loss_sum, grad_norm, due = _fetch(training, device_loss, device_norm)
    # The norm is global, so all ranks skip the same steps.
    if np.isfinite(grad_norm):
        _rotate_if_due(training)
        skip = spikes.record(grad_norm)
    else:
        progress.not_finite.append(step + 1)
        skip = True
    if skip:
        progress.skipped.append(step + 1)
    elif not queued:
        training.optimizer.step()
    _zero_gradients(training)
    n_tokens = _n_tokens(training.cache, windows)
    progress.step, progress.tokens = step + 1, progress.tokens + n_tokens
    record = {
        "step": progress.step,
        "loss": loss_sum / n_targets,
        "learning_rate": rate,
        "grad_norm": grad_norm,
        "tokens": progress.tokens,
        "windows_crc32": zlib.crc32(windows.tobytes()),  # shows which windows were trained on
        "tokens_per_s": n_tokens / (time.perf_counter() - started),
        **({"skipped": True} if skip else {}),
    }
    _log_step(training, record)
    _log_lasting_spike(training, progress)
    _halt_on_non_finite(training, progress)
    return due


def _backward(training: Training, batches: Iterator[Batch], n_batches: int, n_targets: int) -> Tensor:
    """Accumulate the gradient of Σ loss / n_targets over the windows of all processes; return this process's Σ loss.

    DDP and FSDP average gradients over processes; the factor `num_processes` turns the mean into a sum. DDP reduces
    once, after the last micro-batch. FSDP reduces after each micro-batch: to wait, every device would have to hold
    the whole gradient.
    """
    check_every = n_batches // STOP_CHECKS if n_batches >= 2 * STOP_CHECKS else n_batches
    scale = training.accelerator.num_processes / n_targets
    sharded = is_sharded(training.accelerator)
    losses = []
    for i, batch in enumerate(batches):
        if i and i % check_every == 0 and _is_asked_to_stop(training):
            raise _StepAbandonedError
        top = batch.top and batch.top.as_inputs()
        with nullcontext() if sharded or i == n_batches - 1 else training.accelerator.no_sync(training.loss_module):
            loss = training.loss_module(batch.ids_BT, batch.labels_BT, batch.documents_BT, top=top)
            training.accelerator.backward(loss * scale)
        losses.append(loss.detach())
    return torch.stack(losses).double().sum()


def _zero_gradients(training: Training) -> None:
    """Zero the gradients, or free them unless DDP reduces them.

    DDP's gradients are views of its buckets (`_join_buckets`), and must stay so.
    """
    training.optimizer.zero_grad(set_to_none=not isinstance(training.loss_module, DistributedDataParallel))


def _is_asked_to_stop(training: Training) -> bool:
    """Return whether any process has received a signal. All processes must call this at the same time."""
    asked = torch.tensor(float(bool(training.stop_request.reason)), device=training.accelerator.device)
    return bool(all_reduce_sum(training.accelerator, asked).item())


def _clip(training: Training) -> Tensor:
    """Clip the gradient; return its norm over all processes before that, in float64."""
    norm = training.accelerator.clip_grad_norm_(training.loss_module.parameters(), CLIP)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    # Each rank, or replica of shards, has computed it from the same gradient, but perhaps on another kind of device,
    # and all must take the same decision by it.
    return all_reduce_max(training.accelerator, whole.double())


def _fetch(training: Training, loss_sum: Tensor, grad_norm: Tensor) -> tuple[float, float, _Due]:
    """Return the loss sum of all processes, the gradient norm, and what is due.

    This takes one all-reduce, and one copy to the host, which waits for the device. Raises LockLostError, or RunError
    on other ranks than the main, if another training has taken the run's lock.
    """
    now = time.monotonic()
    wants_stop = bool(training.stop_request.reason) or now >= training.deadline
    wants_save = now >= training.save_tried_at + SAVE_SECONDS
    wanted = (wants_stop, wants_save, training.checkpoints.has_lost_lock())
    sums = torch.stack([loss_sum, *(torch.full_like(loss_sum, float(each)) for each in wanted)])
    total, stops, saves, lost, norm = torch.cat([all_reduce_sum(training.accelerator, sums), grad_norm[None]]).tolist()
    if lost:
        training.checkpoints.check_lock()
    return total, norm, _Due(stops > 0, saves > 0)


def _log_step(training: Training, record: dict[str, Any]) -> None:
    log_record(training, record)
    numbers = {k: v for k, v in record.items() if k not in ("step", "windows_crc32")}
    log_tracker_failures(training, record["step"], log_to_trackers(training.accelerator, numbers, record["step"]))


def _log_lasting_spike(training: Training, progress: TrainingProgress) -> None:
    """Log an event if the last updates, a multiple of SPIKES_IN_A_ROW, were all left out because of spikes."""
    spikes, n = set(progress.skipped) - set(progress.not_finite), 0
    while progress.step - n in spikes:
        n += 1
    if n and n % SPIKES_IN_A_ROW == 0:
        why = f"the last {n} gradient norms were spikes: the norm has risen for longer, and its limit follows slowly"
        log_record(training, {"step": progress.step, "event": "updates left out", "why": why})


def _n_tokens(cache: TokenCache, windows: Integers) -> int:
    begins = windows * cache.seq_len
    return int((np.minimum(begins + cache.seq_len, cache.manifest.n_tokens) - begins).sum())


def _halt_on_non_finite(training: Training, progress: TrainingProgress) -> None:
    """Raise RunHaltedError if the last gradient was not finite and weights are broken or too many were so."""
    if progress.not_finite[-1:] != [progress.step]:
        return
    _halt_if_weights_are_not_finite(training, progress)
    recent = [step for step in progress.not_finite if step > progress.step - HALT_WINDOW]
    if len(recent) < HALT_COUNT:
        return
    text = f"{len(recent)} of the last {HALT_WINDOW} gradients were not finite (steps {', '.join(map(str, recent))})"
    if recent[-HALT_COUNT] == progress.step - HALT_COUNT + 1:  # consecutive: the data differed, the weights did not
        raise RunHaltedError(f"{text}; the weights are probably broken, and {_last_good(training, progress)}")
    _save(training, progress)
    raise RunHaltedError(f"{text}; halted with the last good weights saved. A lower --lr or cleaner data may help.")


def _halt_if_weights_are_not_finite(training: Training, progress: TrainingProgress) -> None:
    """Raise RunHaltedError if weights are not finite: no later gradient can be finite then."""
    if not has_finite_weights(training.loss_module, training.accelerator):
        raise RunHaltedError(
            f"after step {progress.step}, weights are NaN or infinite, and {_last_good(training, progress)}"
        )


def _last_good(training: Training, progress: TrainingProgress) -> str:
    """Return where weights that the last update has broken were saved, and which checkpoint to restart from."""
    last_update = max(set(range(1, progress.step + 1)) - set(progress.skipped), default=0)
    steps = list(list_checkpoints(training.checkpoints.folder))
    good, broken = [[step for step in steps if (step < last_update) is before] for before in (True, False)]
    saved = f"checkpoints hold them (step {', '.join(map(str, broken))})" if broken else "were not saved"
    if not good:
        return f"{saved}: there is no checkpoint from before. Start a new run with a lower --lr or --weight-decay."
    return (
        f"{saved}: the checkpoint of step {good[-1]} is from before. Export it (--step {good[-1]}), and start a new "
        "run from there with a lower --lr or --weight-decay."
    )


def _evaluate_if_due(training: Training, step: int) -> str | None:
    """Evaluate before `step` if due. Return None to go on, or this rank's reason to stop.

    The reason is empty if only another rank has one.
    """
    if training.eval_cache is None or (step % training.eval_every and step != training.schedule.total_steps):
        return None
    try:
        result = evaluate(
            training.loss_module,
            training.eval_cache,
            # As many tokens as in training; the held-out windows may be longer.
            max(1, training.micro_batch * training.cache.seq_len // training.eval_cache.seq_len),
            training.accelerator,
            # Not at the deadline: a run that is resumed for less time than this takes would never go on.
            lambda: bool(training.stop_request.reason),
            _evaluation_progress(training, step, training.eval_cache.n_windows),
        )
    except EvaluationStopped:
        return _reason(training)
    means = result.to_dict()
    log_record(training, {"step": step, "evaluation": means})
    if step == training.metrics.repeated_evaluation:  # trackers have it
        return None
    numbers = {f"held-out/{name}": value for name, value in means.items() if value is not None}
    log_tracker_failures(training, step, log_to_trackers(training.accelerator, numbers, step))
    return None


def _evaluation_progress(training: Training, step: int, n_windows: int) -> Callable[[float], None]:
    """Return a function that shows how far an evaluation is; call it with the number of further windows."""
    done = 0.0

    def advance(n: float) -> None:
        nonlocal done
        done = min(done + n, n_windows)  # the last batch may be padded
        if training.accelerator.is_main_process:
            training.show({"step": step, "evaluated": done, "of": n_windows})

    return advance


def _reason(training: Training) -> str:
    """Return this process's reason to stop; empty if it has none."""
    if training.stop_request.reason:
        return training.stop_request.reason
    return "max-minutes" if time.monotonic() >= training.deadline else ""


def _stop(training: Training, progress: TrainingProgress, reason: str) -> str:
    """Save a checkpoint; return the reason of the lowest rank that has one."""
    _save(training, progress)
    return next(filter(None, all_gather(training.accelerator, reason)))


def _save(training: Training, progress: TrainingProgress) -> None:
    """Write a checkpoint unless this step has one. Raises RunHaltedError first if weights are not finite."""
    if training.saved_step != progress.step:
        _halt_if_weights_are_not_finite(training, progress)
        keep = progress.step == decay_start(training.schedule)
        training.save_tried_at = time.monotonic()
        training.checkpoints.save(training.loss_module, training.optimizer, asdict(progress), keep)
        training.saved_step, training.rotation_is_due = progress.step, True


def _rotate_if_due(training: Training) -> None:
    """Remove old checkpoints; called once the weights of the newest one are confirmed."""
    decay = decay_start(training.schedule)
    if training.rotation_is_due and (problem := training.checkpoints.rotate(training.saved_step, decay)):
        log_record(training, {"step": training.saved_step, "event": "old checkpoint not removed", "why": problem})
    training.rotation_is_due = False


def _try_to_save(training: Training, progress: TrainingProgress) -> None:
    """Write a checkpoint. If that fails, log an event and continue."""
    try:
        _save(training, progress)
    except SaveError as error:
        log_record(training, {"step": progress.step, "event": "not saved", "why": str(error)})


def log_tracker_failures(training: Training, step: int, failures: list[str]) -> None:
    """Log that trackers failed."""
    for failure in failures:
        log_record(training, {"step": step, "event": "not tracked from here", "why": failure})


def log_record(training: Training, record: dict[str, Any]) -> None:
    """Log a record with the time, and show it, on the main process."""
    if training.accelerator.is_main_process:
        record = {**record, "time": time.time()}
        if problem := training.metrics.write(record):
            training.show({"step": record["step"], "event": "metrics wait for room on the disk", "why": problem})
        training.show(record)
