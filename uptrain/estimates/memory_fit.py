"""Find the options of a run, and the micro-batch, that fit a device."""

from collections.abc import Iterable, Iterator
from itertools import product

from uptrain.data.default_sizes import default_micro_batch
from uptrain.estimates.memory import MemoryEstimator, MemoryOptions
from uptrain.models.trainable_parts import parts_of


def micro_batch_sizes(seq_len: int, n_windows: int) -> Iterator[int]:
    """Yield the sizes of a micro-batch that a run tries, in windows: the default, its halves, and one.

    `n_windows`: how many a process has in a step.
    """
    n = default_micro_batch(seq_len, n_windows)
    while n > 1:
        yield n
        n //= 2
    yield 1


def first_that_fits(
    estimator: MemoryEstimator,
    parts: Iterable[str],
    nbytes: int,
    n_windows: int,
    devices: int = 1,
    activation_checkpointing: Iterable[bool] = (False, True),
    micro_batch: int | None = None,
) -> MemoryOptions | None:
    """Return the first options whose memory on each device is at most `nbytes`; None if none is.

    `n_windows`: how many windows a device has in a step. `micro_batch`: the only one to try, in windows; None: any.

    The order: by part, without activation checkpointing, then with it, each with the largest micro-batch
    that fits. Parts that the model does not have are left out.
    """
    known = [trainable for trainable in parts if trainable in parts_of(estimator.config)]
    sizes = [min(micro_batch, n_windows)] if micro_batch else [*micro_batch_sizes(estimator.seq_len, n_windows)]
    for trainable, recompute, size in product(known, activation_checkpointing, sizes):
        chosen = MemoryOptions(trainable, size, recompute)
        if estimator.memory(chosen).per_device(devices) <= nbytes:
            return chosen
    return None
