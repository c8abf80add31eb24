"""Processes: what `accelerate launch` has set up, checked, and how the model is spread over them.

One process, DDP, or FSDP2 (sharded parameters, gradients and optimizer states). Letters are those of `model.llama`.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    gather_object,
)
from torch import Tensor, nn

from model.errors import InputError
from uptrain.signals import interruptible

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)
_POLL_SECONDS = 0.5


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
        raise InputError("DeepSpeed is not supported by this version; use scripts/accelerate/fsdp2.yaml or ddp.yaml.")
    accelerator = Accelerator(
        cpu=not has_accelerator(),
        mixed_precision="bf16" if precision == "bf16" else "no",
        fsdp_plugin=_sharding(precision, block_names) if wants_sharding else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],  # else gradients are there twice
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
            f"{accelerator.distributed_type.value}; use scripts/accelerate/ddp.yaml here."
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


def _sharding(precision: str, block_names: Sequence[str]) -> FullyShardedDataParallelPlugin:
    """Return FSDP2's settings, in full: accelerate's own would sum gradients and round the loss in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = torch.bfloat16 if precision == "bf16" else None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(block_names),
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, output_dtype=None),
    )


def is_sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def read_once(
    accelerator: Accelerator, read: Callable[[], Model], empty: Callable[[], Model]
) -> tuple[Model, dict[str, Any]]:
    """Read a model; return it, and the weights that `spread` is to give it when it is in shards.

    Where models are sharded, the main process alone reads it, so that the machine need not hold it many times; in the
    others it is empty.
    """
    if not is_sharded(accelerator):
        return read(), {}
    found: list[Model] = []
    on_main(accelerator, lambda: found.append(read()))
    return (found[0], found[0].state_dict()) if found else (empty(), {})


def spread(accelerator: Accelerator, model: nn.Module, weights: dict[str, Any]) -> None:
    """Give every process its shards of the weights that the main one has read."""
    if is_sharded(accelerator):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)


def place_teacher(accelerator: Accelerator, teacher: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Move a teacher to the device, in shards where the student is sharded; its embedding and head stay whole.

    From the CPU layer by layer, since the whole of it may be larger than the device.
    """
    if not is_sharded(accelerator):
        teacher.to(accelerator.device)
        return
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    for block in blocks:
        fully_shard(block, reshard_after_forward=True)  # said, for each is a root, and roots would stay whole
    for tensor in (*teacher.parameters(), *teacher.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(accelerator.device)


def add_up(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Return the sum over all processes."""
    if accelerator.num_processes > 1:
        dist.all_reduce(values)
    return values


def gather(accelerator: Accelerator, value: T) -> list[T]:
    """Return every process' value, in the order of ranks."""
    if accelerator.num_processes == 1:
        return [value]
    found: list[T] = gather_object([value])
    return found


def leave() -> None:
    """Leave the process group, once nothing that uses it is left.

    DDP's reducer, if it were the group's last owner, would wait for gloo's thread with the interpreter's lock in hand,
    for which that thread may be waiting.
    """
    PartialState().destroy_process_group()


def is_lost_process(error: Exception) -> bool:
    """Say whether an error means that another process could not be reached, most likely because it has ended.

    gloo's are RuntimeErrors that name the file they come from. NCCL mostly ends the process itself, from its watchdog,
    at the latest ten minutes after.
    """
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def main_first(work: Callable[[], object], done: Path) -> None:
    """Let the main process do what may take long and ends with a file, while the others wait for that file.

    Before the processes join: a message between them would not be waited for as long (by NCCL, ten minutes). If the
    main process fails, the launcher ends the others.
    """
    if os.environ.get("RANK", "0") == "0":
        work()
    with interruptible():
        while not done.is_file():
            time.sleep(_POLL_SECONDS)


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Let the main process do something, and give all its result, or its InputError."""
    outcome: list[tuple[T | None, str | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            outcome = [(work(), None)]
        except (InputError, OSError) as error:
            outcome = [(None, str(error))]
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, message = outcome[0]
    if message is not None:
        raise InputError(message)
    return result  # type: ignore[return-value]
