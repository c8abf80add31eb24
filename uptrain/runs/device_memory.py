"""Compare the estimated memory of a run with that of the device, before weights are read.

Choose the micro-batch that fits, or refuse the run. If the user chose it, only warn.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from model.common.console import format_bytes
from model.common.errors import InputError, RankError
from model.common.launcher_variables import is_local_main_process, local_world_size
from model.common.machine import available_memory
from model.decoder.devices import free_memory
from uptrain.distributed.accelerator import devices_per_replica, own_gpu, uses_gpu
from uptrain.estimates.memory import MemoryEstimator, MemoryOptions
from uptrain.estimates.memory_fit import first_that_fits
from uptrain.estimates.plan import run_command
from uptrain.models.trainable_choices import TRAINABLE
from uptrain.models.trainable_parts import knows_attention

RESERVE = 0.08
"""Share of the free memory that a run's estimate must not take. Measurements are up to 8.7 % above the estimate
(docs/training.md), and 1 / (1 − 0.08) is 1.087."""


def has_estimate(config: dict[str, Any]) -> bool:
    """Return whether the memory of a model can be estimated from its config and the headers of its files."""
    return isinstance(config.get("intermediate_size"), int) and knows_attention(config)


def fitting_micro_batch(
    estimator: MemoryEstimator, chosen: MemoryOptions, n_windows: int, model: Path, teacher: Path | None
) -> int:
    """Return the largest micro-batch up to the default that fits this process's device, in windows.

    `n_windows`: how many a process has in a step.
    `chosen`: the run's options, with any micro-batch. Raises InputError, or RankError for another GPU than the first,
    if one window does not fit. The error names the first command that does.
    """
    devices = devices_per_replica()
    usable = usable_memory()
    as_chosen = [chosen.activation_checkpointing]
    if largest := first_that_fits(estimator, [chosen.trainable], usable, n_windows, devices, as_chosen):
        return largest.micro_batch
    needed = estimator.memory(MemoryOptions(chosen.trainable, 1, chosen.activation_checkpointing)).per_device(devices)
    cheaper = first_that_fits(estimator, TRAINABLE[TRAINABLE.index(chosen.trainable) :], usable, n_windows, devices)
    rounded_down = f"{max(usable // 10_000 / 100, 0.01):g}MB" if usable < 10**9 else f"{usable // 10**7 / 100:g}GB"
    advice = (
        f"this fits: {run_command(cheaper, str(model), teacher, estimator, devices)} …"
        if cheaper
        else f"nothing fits; `uptrain plan {shlex.quote(str(model))} --memory {rounded_down} …` shows what more "
        "devices take"
    )
    refusal = (
        f"{chosen.flags} needs an estimated {format_bytes(needed)} for one window of {estimator.seq_len} tokens, but "
        f"the device has {format_bytes(usable)} free (less a reserve of {RESERVE:.0%}); {advice} (or try anyway, with "
        "--micro-batch 1)."
    )
    if uses_gpu() and not is_local_main_process():  # whose device may have more
        raise RankError(f"process {os.environ.get('RANK', '?')}: {refusal}")
    raise InputError(refusal)


def too_large_warning(estimator: MemoryEstimator, chosen: MemoryOptions) -> str | None:
    """Return a warning if options with the user's micro-batch do not fit this process's device; None if they do."""
    needed, usable = estimator.memory(chosen).per_device(devices_per_replica()), usable_memory()
    if needed <= usable:
        return None
    return (
        f"{chosen.flags} --micro-batch {chosen.micro_batch} needs an estimated {format_bytes(needed)}, but the device "
        f"has {format_bytes(usable)} free (less a reserve of {RESERVE:.0%}): the run may fail for lack of memory."
    )


def usable_memory() -> int:
    """Return the free bytes of this process's device, less the reserve.

    The processes of a machine share the memory of its CPU.
    """
    free = free_memory(own_gpu()) if uses_gpu() else available_memory() // local_world_size()
    return int((1 - RESERVE) * free)
