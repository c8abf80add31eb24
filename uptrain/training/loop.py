"""The training loop.

Learning rate, windows and the loss' scale are pure functions of the step and the global batch, so that a run may be
stopped anywhere, go on with any number of processes, and still be the same run.
"""

import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from model.common.errors import RunError
from uptrain.budget.schedule import Schedule, decay_start, learning_rate
from uptrain.checkpoints.files import list_checkpoints
from uptrain.checkpoints.save_load import Checkpoints, SaveError
from uptrain.data.batch import micro_batches
from uptrain.data.order import windows_of_step
from uptrain.data.token_cache import Cache, Integers
from uptrain.distributed.collectives import all_reduce_sum, gather
from uptrain.distributed.fsdp import is_sharded
from uptrain.runs.metrics_log import Metrics
from uptrain.runs.signals import StopRequest
from uptrain.training.eval_metrics import EvalResult
from uptrain.training.evaluate import Stopped, evaluate
from uptrain.training.module import has_finite_weights

CLIP = 1.0
HALT_COUNT, HALT_WINDOW = 3, 100
SPIKE_WINDOW = 128


@dataclass
class RunState:
    """Where a run stands: all that a checkpoint holds beside tensors."""

    step: int = 0
    """Finished steps."""
    tokens: int = 0
    skipped: list[int] = field(default_factory=list)
    """Steps, counted from 1, whose update was left out, because their gradient was not finite or a spike."""
    not_finite: list[int] = field(default_factory=list)
    """Those of them whose gradient was not finite."""
    grad_norms: list[float] = field(default_factory=list)
    """Of the last steps, for the spike rule."""


@dataclass
class Training:
    """Everything the loop works with."""

    trainee: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    cache: Cache
    schedule: Schedule
    checkpoints: Checkpoints
    metrics: Metrics
    stop_request: StopRequest
    global_batch: int
    """Windows of one optimizer step, over all processes."""
    micro_batch: int
    """Windows that one process takes at a time."""
    seed: int
    save_every: int
    eval_cache: Cache | None
    eval_every: int
    spike_sigma: float | None
    deadline: float
    """`time.monotonic()` at which to stop."""
    show: Callable[[dict[str, Any]], None]
    saved_step: int = -1
    """The step of the newest checkpoint."""
    rotation_is_due: bool = False
    """Whether older ones are there to be removed, once a gradient shows that the newest one's weights are good."""


class NonFiniteGradientsError(RunError):
    """Too many gradients were not finite, or weights are not."""


def train(t: Training, progress: RunState) -> str:
    """Train from where `progress` stands; return "finished", or why the run stopped before.

    Raises Halted when 3 gradients in 100 were not finite, with the state saved; with nothing saved when it was 3 in a
    row, or at once when weights are not finite. Raises SaveError if the last save failed.
    """
    rank, world = t.accelerator.process_index, t.accelerator.num_processes
    share = slice(rank * t.global_batch // world, (rank + 1) * t.global_batch // world)
    t.trainee.train()
    for step in range(progress.step, t.schedule.total_steps):
        if (reason := _evaluate_if_due(t, step)) is not None:
            return _stop(t, progress, reason)
        started = time.perf_counter()
        torch.manual_seed(hash((t.seed, step, rank)))
        windows = windows_of_step(step, t.cache.n_windows, t.global_batch, t.seed)
        n_targets = max(1, t.cache.n_targets(windows))  # of none, loss and gradient are 0
        rate = learning_rate(t.schedule, step)
        for group in t.optimizer.param_groups:
            group["lr"] = rate
        loss_sum = _backward(t, windows[share], n_targets)
        grad_norm = float(t.accelerator.clip_grad_norm_(t.trainee.parameters(), CLIP))
        loss_sum, stop = _reduce_step(t, loss_sum)
        skip = _should_skip(t, progress, grad_norm)
        if np.isfinite(grad_norm):
            _rotate_if_due(t)
        if skip:
            progress.skipped.append(step + 1)
        else:
            t.optimizer.step()
        t.optimizer.zero_grad()
        progress.step, progress.tokens = step + 1, progress.tokens + _n_tokens(t.cache, windows)
        seconds = time.perf_counter() - started
        _record(t, progress, loss_sum / n_targets, rate, grad_norm, skip, windows, seconds)
        _halt_on_non_finite(t, progress)
        if stop:
            return _stop(t, progress, _reason(t))
        if progress.step % t.save_every == 0 or progress.step == decay_start(t.schedule):
            _try_to_save(t, progress)
    if (reason := _evaluate_if_due(t, t.schedule.total_steps)) is not None:
        return _stop(t, progress, reason)
    _save(t, progress)
    _rotate_if_due(t)
    return "finished"


def _backward(t: Training, windows: Integers, n_targets: int) -> float:
    """Add up the gradient of Σ loss / n_targets over all processes' windows; return this process' Σ loss.

    DDP and FSDP average over processes, which the number of processes here undoes. DDP does so after the last
    micro-batch, FSDP after each, as it would have to keep the whole gradient on every device until then.
    """
    scale = t.accelerator.num_processes / n_targets
    last = -(-len(windows) // t.micro_batch) - 1
    sharded = is_sharded(t.accelerator)
    losses = []
    for i, batch in enumerate(micro_batches(t.cache, windows, t.micro_batch, t.accelerator.device)):
        with nullcontext() if sharded or i == last else t.accelerator.no_sync(t.trainee):
            loss = t.trainee(batch.ids_BT, batch.labels_BT, batch.documents_BT)
            t.accelerator.backward(loss * scale)
        losses.append(loss.detach())
    return float(torch.stack(losses).double().sum())


def _reduce_step(t: Training, loss_sum: float) -> tuple[float, bool]:
    """Return the loss of all processes, and whether any was asked to stop: the step's one message."""
    wants_stop = bool(t.stop_request.reason) or time.monotonic() >= t.deadline
    values = torch.tensor([loss_sum, float(wants_stop)], dtype=torch.float64, device=t.accelerator.device)
    total, stops = all_reduce_sum(t.accelerator, values).tolist()
    return total, stops > 0


def _should_skip(t: Training, progress: RunState, grad_norm: float) -> bool:
    """Say whether to leave the update out. The norm is that of all processes' gradient, so that all say the same."""
    if not np.isfinite(grad_norm):
        progress.not_finite.append(progress.step + 1)
        return True
    if t.spike_sigma is None:
        return False
    recent = progress.grad_norms
    full = len(recent) == SPIKE_WINDOW
    limit = float(np.mean(recent) + t.spike_sigma * np.std(recent)) if full else np.inf
    # What is beyond the limit counts as the limit: one spike does not hide the next, and a rise that lasts is followed.
    progress.grad_norms = [*recent[-SPIKE_WINDOW + 1 :], min(grad_norm, limit)]
    return grad_norm > limit


def _record(
    t: Training, progress: RunState, loss: float, rate: float, grad_norm: float, skip: bool, windows: Integers, s: float
) -> None:
    """Write the step down. `windows` is a checksum of their numbers: the ledger of what was trained on."""
    n_tokens = _n_tokens(t.cache, windows)
    record = {
        "step": progress.step,
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": grad_norm,
        "tokens": progress.tokens,
        "windows": zlib.crc32(windows.tobytes()),
        "tokens_per_s": n_tokens / s,
        **({"skipped": True} if skip else {}),
    }
    _note(t, record)
    t.accelerator.log({k: v for k, v in record.items() if k not in ("step", "windows")}, step=progress.step)


def _n_tokens(cache: Cache, windows: Integers) -> int:
    begins = windows * cache.seq_len
    return int((np.minimum(begins + cache.seq_len, cache.manifest.n_tokens) - begins).sum())


def _halt_on_non_finite(t: Training, progress: RunState) -> None:
    """Raise Halted if the last gradient was not finite, and that was not the first time or will not be the last."""
    if not _last_was_not_finite(progress):
        return
    _halt_if_weights_are_not_finite(t, progress)
    recent = [step for step in progress.not_finite if step > progress.step - HALT_WINDOW]
    if len(recent) < HALT_COUNT:
        return
    text = f"{len(recent)} of the last {HALT_WINDOW} gradients were not finite (steps {', '.join(map(str, recent))})"
    if recent[-HALT_COUNT] == progress.step - HALT_COUNT + 1:  # on other data each, but with the same weights
        raise NonFiniteGradientsError(
            f"{text}; the weights are taken to be broken, and were not saved: {_last_good(t, progress)}"
        )
    _save(t, progress)
    raise NonFiniteGradientsError(
        f"{text}; halted with the last good weights saved. A lower --lr or cleaner data may help."
    )


def _halt_if_weights_are_not_finite(t: Training, progress: RunState) -> None:
    """Raise Halted if an update has broken the weights: no later gradient can be finite then."""
    if not has_finite_weights(t.trainee, t.accelerator):
        raise NonFiniteGradientsError(
            f"after step {progress.step}, weights are NaN or infinite, and were not saved: {_last_good(t, progress)}"
        )


def _last_good(t: Training, progress: RunState) -> str:
    """Say which checkpoint to begin anew from, where the last update has broken the weights."""
    last_update = max(set(range(1, progress.step + 1)) - set(progress.skipped), default=0)
    if not last_update:
        return "they are those that the run began with. Is a weight of the model NaN or infinite?"
    steps = [step for step in list_checkpoints(t.checkpoints.folder) if step < last_update]
    if not steps:
        return "no checkpoint is from before. Start a new run with a lower --lr or --weight-decay."
    return (
        f"the checkpoint of step {steps[-1]} is from before. Export it (--step {steps[-1]}), and start a new run from "
        "there with a lower --lr or --weight-decay."
    )


def _last_was_not_finite(progress: RunState) -> bool:
    return progress.not_finite[-1:] == [progress.step]


def _evaluate_if_due(t: Training, step: int) -> str | None:
    """Evaluate before the step where it is due; return the reason if the run is to stop."""
    if t.eval_cache is None or (step % t.eval_every and step != t.schedule.total_steps):
        return None
    with_teacher = t.accelerator.unwrap_model(t.trainee).teacher is not None
    try:
        found = evaluate(t.trainee, t.eval_cache, t.micro_batch, t.accelerator, with_teacher, lambda: bool(_reason(t)))
    except Stopped:
        return _reason(t)
    means = _means(found)
    _note(t, {"step": step, "evaluation": means})
    t.accelerator.log({f"held-out/{name}": value for name, value in means.items()}, step=step)
    return None


def _means(found: EvalResult) -> dict[str, float]:
    return {name: value for name, value in vars(found).items() if value is not None}


def _reason(t: Training) -> str:
    """Say why this process wants to stop, or, in others, that one did; empty if none is known here."""
    if t.stop_request.reason:
        return t.stop_request.reason
    return "max-minutes" if time.monotonic() >= t.deadline else ""


def _stop(t: Training, progress: RunState, reason: str) -> str:
    """Save, and return the reason of the first process that has one."""
    _save(t, progress)
    return next(filter(None, gather(t.accelerator, reason)))


def _save(t: Training, progress: RunState) -> None:
    """Write a checkpoint unless this very step has one. Raises Halted, and writes none, if weights are not finite."""
    if t.saved_step != progress.step:
        _halt_if_weights_are_not_finite(t, progress)
        keep = progress.step == decay_start(t.schedule)
        t.checkpoints.save(t.trainee, t.optimizer, asdict(progress), keep)
        t.saved_step, t.rotation_is_due = progress.step, True


def _rotate_if_due(t: Training) -> None:
    """Remove old checkpoints once the weights of the newest one have proved good."""
    if t.rotation_is_due and (problem := t.checkpoints.rotate(t.saved_step)):
        _note(t, {"step": t.saved_step, "event": "old checkpoint not removed", "why": problem})
    t.rotation_is_due = False


def _try_to_save(t: Training, progress: RunState) -> None:
    """Write a checkpoint; if that fails, say so and train on."""
    try:
        _save(t, progress)
    except SaveError as error:
        _note(t, {"step": progress.step, "event": "not saved", "why": str(error)})


def _note(t: Training, record: dict[str, Any]) -> None:
    """Write a record down and show it."""
    if t.accelerator.is_main_process:
        if problem := t.metrics.write(record):
            t.show({"step": record["step"], "event": "metrics wait for room on the disk", "why": problem})
        t.show(record)
