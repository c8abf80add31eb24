"""Evaluation on held-out windows: every target counts once, however many processes share the work."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from uptrain.data.batch import Batch, micro_batches
from uptrain.data.cache import Cache
from uptrain.measures import Measures
from uptrain.parallel import add_up


class Stopped(Exception):
    """A process was asked to stop during an evaluation; all have left it."""


def evaluate(
    trainee: nn.Module,
    cache: Cache,
    micro_batch: int,
    accelerator: Accelerator,
    with_teacher: bool,
    should_stop: Callable[[], bool] = lambda: False,
    advance: Callable[[float], None] = lambda n: None,
) -> Measures:
    """Measure a prepared trainee on all windows of a cache. Raises Stopped on all processes once one should stop."""
    sums = torch.zeros(5, dtype=torch.float64, device=accelerator.device)
    was_training = trainee.training
    trainee.eval()
    with torch.no_grad():
        for batch in _batches(cache, micro_batch, accelerator):
            sums += trainee(batch.ids_BT, batch.labels_BT, batch.documents_BT, measure=True)
            stop = torch.tensor([float(should_stop())], device=accelerator.device)
            if add_up(accelerator, stop).item():
                trainee.train(was_training)
                raise Stopped
            advance(len(batch.ids_BT) * accelerator.num_processes)
    trainee.train(was_training)
    return Measures.from_sums(add_up(accelerator, sums), with_teacher)


def _batches(cache: Cache, micro_batch: int, accelerator: Accelerator) -> Iterator[Batch]:
    """Yield this process' share. All get equally many batches, since sharded models run in step."""
    rank, world = accelerator.process_index, accelerator.num_processes
    n_batches = -(-cache.n_windows // (micro_batch * world))
    mine = np.arange(rank, cache.n_windows, world)
    yield from micro_batches(cache, mine, micro_batch, accelerator.device)
    for _ in range(n_batches - -(-len(mine) // micro_batch)):
        yield Batch.ignored(cache.seq_len, accelerator.device)
