"""What `accelerate launch` has set up, checked: the device, and one process, DDP, or FSDP2."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)

from model.common.errors import InputError
from uptrain.distributed.fsdp import fsdp_plugin, is_sharded

PATIENCE = timedelta(minutes=30)
"""How long processes wait for one that reads a model or checks a checkpoint for all; NCCL's ten minutes may not do."""


def has_accelerator() -> bool:
    """Say whether to train on another device than the CPU.

    Apple's does not count: it has no float64, in which losses are added up.
    """
    if _is_set("ACCELERATE_USE_CPU") or not torch.accelerator.is_available():
        return False
    return str(torch.accelerator.current_accelerator()) != "mps"


def make_accelerator(
    precision: str, block_names: Sequence[str], track: Sequence[str] = (), folder: Path | None = None
) -> Accelerator:
    """Join the processes that the launcher started.

    Raises InputError where they did not find one another, or sharding was asked for and is not to be had: accelerate
    would go on without a word, as several trainings in one folder, or unsharded.
    """
    if missing := set(track) - {str(tracker) for tracker in get_available_trackers()}:
        # accelerate would leave it out without a word
        raise InputError(f"--track {min(missing)} needs a package: pip install {min(missing)}.")
    check_launcher()
    wants_sharding = _is_set("ACCELERATE_USE_FSDP")
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        raise InputError(
            "DeepSpeed is not supported by this version; use scripts/launch/accelerate/fsdp2.yaml or ddp.yaml."
        )
    accelerator = Accelerator(
        cpu=not has_accelerator(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        fsdp_plugin=fsdp_plugin(precision, block_names) if wants_sharding else None,
        # The loop accumulates itself. Without this a variable of the environment would make accelerate divide by more.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # else gradients are there twice
            InitProcessGroupKwargs(timeout=PATIENCE),
        ],
        log_with=list(track) or None,
        project_config=ProjectConfiguration(str(folder), logging_dir=f"{folder}/tensorboard") if track else None,
    )
    # One that stops right away, for a reason that it tells, would cut off others that are still joining.
    accelerator.wait_for_everyone()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise InputError(
            f"the launcher started {launched} processes, but accelerate sees {accelerator.num_processes}; without GPUs "
            "set ACCELERATE_USE_CPU=true, and start with `accelerate launch` or torchrun."
        )
    if wants_sharding and not is_sharded(accelerator):
        raise InputError(
            f"sharding (FSDP) was asked for, but accelerate dropped it on this device and chose "
            f"{accelerator.distributed_type.value}; use scripts/launch/accelerate/ddp.yaml here."
        )
    return accelerator


def check_launcher() -> None:
    """Refuse a WORLD_SIZE that no launcher has set, as it would have set more."""
    world = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world != "1" and missing:
        raise InputError(
            f"WORLD_SIZE={world} is set, but not {', '.join(missing)}; start many processes with torchrun or "
            "`accelerate launch`, or one with WORLD_SIZE unset."
        )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")
