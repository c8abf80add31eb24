"""Evaluate a model on held-out windows: each target counts once, for any world size."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from model.decoder.devices import float64_device
from uptrain.data.batch import Batch, micro_batches
from uptrain.data.token_cache import TokenCache
from uptrain.distributed.collectives import all_reduce_sum
from uptrain.training.eval_metrics import TOTALS, EvalResult


class EvaluationStopped(Exception):
    """Signal that a process was asked to stop during an evaluation. All ranks raise it."""


def evaluate(
    loss_module: nn.Module,
    cache: TokenCache,
    micro_batch: int,
    accelerator: Accelerator,
    should_stop: Callable[[], bool] = lambda: False,
    advance: Callable[[float], None] = lambda n: None,
) -> EvalResult:
    """Evaluate a prepared LossModule on all windows of a token cache.

    Raises EvaluationStopped on all ranks once `should_stop` is true on one.
    """
    n = len(TOTALS)
    sums_SS = torch.zeros((n, n), dtype=torch.float64, device=float64_device(accelerator.device))
    was_training = loss_module.training
    loss_module.eval()
    with torch.no_grad():
        for batch in _batches(cache, micro_batch, accelerator):
            sums_SS += loss_module(batch.ids_BT, batch.labels_BT, batch.documents_BT, measure=True)
            stop = torch.tensor([float(should_stop())], device=accelerator.device)
            if all_reduce_sum(accelerator, stop).item():
                loss_module.train(was_training)
                raise EvaluationStopped
            advance(len(batch.ids_BT) * accelerator.num_processes)
    loss_module.train(was_training)
    with_teacher = accelerator.unwrap_model(loss_module).teacher is not None
    return EvalResult.from_sums(all_reduce_sum(accelerator, sums_SS), with_teacher)


def _batches(cache: TokenCache, micro_batch: int, accelerator: Accelerator) -> Iterator[Batch]:
    """Yield this process's batches. All ranks get the same number, since sharded models run collectively."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    n_batches = -(-cache.n_windows // (micro_batch * world_size))
    own_windows = np.arange(rank, cache.n_windows, world_size)
    for batch in micro_batches(cache, own_windows, micro_batch, accelerator.device):
        yield batch.without_padding()
    for _ in range(n_batches - -(-len(own_windows) // micro_batch)):
        yield Batch.without_targets(2, accelerator.device)  # only its collective operations count
