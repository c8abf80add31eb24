"""Make the Accelerator and check the setup of `accelerate launch`: device, and one process, DDP or FSDP2."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)

from model.common.command_options import AUTO_DEVICE
from model.common.errors import InputError
from model.common.launcher_variables import local_rank, local_world_size, world_size
from model.decoder.devices import find_device
from uptrain.distributed.collectives import all_gather
from uptrain.distributed.fsdp import fsdp_plugin, is_sharded

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""NCCL's default of 10 minutes may be too short to load a model or verify a checkpoint. accelerate's groups for shards
with replicas keep that default; they only compute steps."""

_WORLD_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
"""Variables from which accelerate reads the number of processes on CPUs (`PartialState._prepare_backend`)."""
_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
"""Values that accelerate reads as true or false in variables (`str_to_bool`)."""


def uses_gpu() -> bool:
    """Return whether to train on another device than the CPU.

    Apple's MPS does not count: it has no float64, in which losses are summed.
    """
    if _uses_cpu() or not torch.accelerator.is_available():
        return False
    return str(torch.accelerator.current_accelerator()) != "mps"


def wants_sharding() -> bool:
    """Return whether the launcher asks for FSDP."""
    return _is_set("ACCELERATE_USE_FSDP")


def devices_per_replica() -> int:
    """Return how many devices hold one copy of the model: all, or those of a replica; 1 without FSDP."""
    if not wants_sharding():
        return 1
    if not _is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return world_size()
    _refuse_parallelism(sharded=True)
    return int(os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"])


def choose_device(name: str) -> torch.device:
    """Return this process's device for `--device`, and make it the current one of its kind.

    Raises InputError if it is not available, or several processes were started: each has a device of its own.
    """
    n_processes = world_size()
    if name != AUTO_DEVICE and n_processes > 1:
        raise InputError(f"--device {name} is for one process, but {n_processes} were started; leave it out.")
    if name == AUTO_DEVICE and (n_processes > 1 or _uses_cpu()):
        device = own_gpu() if uses_gpu() else torch.device("cpu")
    else:
        device = find_device(name)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def own_gpu() -> torch.device:
    """Return the GPU of this process, one of many. It may be the only one that the process sees."""
    gpu = torch.accelerator.current_accelerator()
    assert gpu is not None
    return torch.device(gpu.type, local_rank() % torch.accelerator.device_count())


def default_precision(device: torch.device) -> str:
    """Return the precision to compute with if none is given: bf16 on a GPU that has it, else fp32.

    On GPUs older than Ampere (V100, T4) torch emulates bfloat16, more slowly than float32.
    """
    if device.type in ("cpu", "mps"):
        return "fp32"
    return "fp32" if emulates_bfloat16(device) else "bf16"


def emulates_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU of NVIDIA without bfloat16 of its own."""
    return device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)


def check_trackers(track: Sequence[str]) -> None:
    """Raise InputError for a tracker whose package is not installed: accelerate would silently ignore it."""
    if missing := set(track) - {str(tracker) for tracker in get_available_trackers()}:
        raise InputError(f"--track {min(missing)} needs a package: pip install {min(missing)}.")


def make_accelerator(
    precision: str,
    layer_class_names: Sequence[str],
    track: Sequence[str] = (),
    folder: Path | None = None,
    device: torch.device | None = None,
) -> Accelerator:
    """Return the Accelerator of the process group that the launcher started. `device`: from `choose_device`.

    Raises InputError if the processes do not form one group, or sharding was requested and is unavailable. accelerate
    would silently run several trainings in one folder, or train unsharded.
    """
    check_trackers(track)
    check_launcher()
    sharded = wants_sharding()
    _refuse_backends()
    _refuse_parallelism(sharded)
    if sharded:
        _refuse_fsdp_settings()
    accelerator = Accelerator(
        cpu=not uses_gpu() if device is None else device.type == "cpu",
        mixed_precision="bf16" if precision == "bf16" else "no",
        fsdp_plugin=fsdp_plugin(precision, layer_class_names) if sharded else None,
        # The loop accumulates gradients itself. Without this, accelerate would divide by a number from the environment.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # otherwise memory holds gradients twice
            InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
        ],
        log_with=list(track) or None,
        project_config=ProjectConfiguration(str(folder), logging_dir=f"{folder}/tensorboard") if track else None,
    )
    if device is not None and accelerator.device.type != device.type:
        raise InputError(f"--device {device} is not possible with ACCELERATE_USE_CPU; unset that variable.")
    _check_group(accelerator, precision)
    if sharded and not is_sharded(accelerator):
        raise InputError(
            f"sharding (FSDP) was requested, but accelerate dropped it on this device and chose "
            f"{accelerator.distributed_type.value}; use scripts/launch/accelerate/ddp.yaml here."
        )
    return accelerator


def _check_group(accelerator: Accelerator, precision: str) -> None:
    """Raise InputError unless the processes that the launcher started form one group, of one precision."""
    # A rank that exits now with an error would break the others while they still join. This is no barrier, because
    # accelerate's names a device by the local rank, which a process that sees only its own does not have.
    precisions = sorted(set(all_gather(accelerator, precision)))
    launched = world_size()
    if launched != accelerator.num_processes:
        raise InputError(
            f"the launcher started {launched} processes, but accelerate sees {accelerator.num_processes}; without GPUs "
            "set ACCELERATE_USE_CPU=true, and start with `accelerate launch` or torchrun."
        )
    if len(precisions) > 1:
        defaults = " and ".join(precisions)
        raise InputError(f"the processes' devices differ in their default precision ({defaults}); give --precision.")


def check_replicas(accelerator: Accelerator) -> None:
    """Raise InputError for replicas (DDP) if a process sees only its own device.

    accelerate passes the local rank to DDP as the number of the device.
    """
    if accelerator.distributed_type == DistributedType.MULTI_GPU:
        rank, n_devices = accelerator.local_process_index, torch.accelerator.device_count()
        if not all(all_gather(accelerator, rank < n_devices)):
            raise InputError(
                "replicas (DDP) need processes that see all GPUs of their machine, but some see fewer than there are "
                "processes on it; start them without `srun --gpus-per-task` or CUDA_VISIBLE_DEVICES of their own, or "
                "shard with scripts/launch/accelerate/fsdp2.yaml."
            )


def _refuse_backends() -> None:
    """Raise InputError for DeepSpeed, and for a launcher that compiles."""
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        raise InputError(
            "DeepSpeed is not supported by this version; use scripts/launch/accelerate/fsdp2.yaml or ddp.yaml."
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":  # accelerate would compile the whole model, which renames its parameters
        raise InputError(
            f"the launcher sets ACCELERATE_DYNAMO_BACKEND={backend} (dynamo_backend), which is not supported; set it "
            "to no, and give `uptrain run` the option --compile in its place."
        )


def _refuse_parallelism(sharded: bool) -> None:
    """Raise InputError for a parallelism_config of the launcher that divides more than the data.

    With tensor, context or sequence parallelism, accelerate would divide the model or the window, of which the loss
    and the loop know nothing: gradients would be wrong, without a message.
    """
    if not _is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    kinds = ("TP", "CP", "SP", "DP_REPLICATE", "DP_SHARD")
    sizes = {f"{kind}_SIZE": os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE") or "1" for kind in kinds}
    n_processes, data_only = world_size(), all(sizes[f"{kind}_SIZE"] == "1" for kind in ("TP", "CP", "SP"))
    replicates, shards = (sizes[f"DP_{kind}_SIZE"] for kind in ("REPLICATE", "SHARD"))
    fits = replicates.isdecimal() and shards.isdecimal() and int(replicates) * int(shards) == n_processes
    if sharded and data_only and fits and int(shards) > 1:
        return
    given = ", ".join(f"{name}={value}" for name, value in sizes.items() if value != "1") or "no sizes"
    raise InputError(
        f"the launcher sets a parallelism_config ({given}{'' if sharded else ', without FSDP'}) that is not supported: "
        f"only shards and replicas of them are, by FSDP with DP_SHARD_SIZE above 1 and DP_REPLICATE_SIZE × "
        f"DP_SHARD_SIZE = {n_processes}, the number of processes; leave it out to shard over all of them."
    )


def _refuse_fsdp_settings() -> None:
    """Raise InputError for settings of FSDP in the launcher's file that `fsdp_plugin` would not obey."""
    for name, advice in (
        ("OFFLOAD_PARAMS", "parameters stay on the device; `uptrain plan --memory` shows what takes less"),
        ("ACTIVATION_CHECKPOINTING", "give `uptrain run` the option --activation-checkpointing in its place"),
    ):
        if _is_set(f"FSDP_{name}"):
            raise InputError(f"fsdp_{name.lower()}: true is not supported: {advice}.")
    if os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        raise InputError(
            "fsdp_reshard_after_forward: false is not supported: layers are sharded again after their forward pass; "
            "leave it true, or keep a replica on each GPU (scripts/launch/accelerate/ddp.yaml)."
        )


def check_launcher() -> None:
    """Raise InputError for variables of a launcher that accelerate would fail or hang with, or if GPUs are too few.

    NCCL refuses two processes on a GPU. A process that sees one GPU may have another than its neighbours.
    """
    n_processes = world_size()
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if n_processes != 1 and missing:
        raise InputError(
            f"WORLD_SIZE={n_processes} is set, but not {', '.join(missing)}; start many processes with torchrun or "
            "`accelerate launch`, or one with WORLD_SIZE unset."
        )
    if missing or not os.environ.get("WORLD_SIZE"):
        _refuse_leftovers()
    if _is_set("ACCELERATE_USE_MEGATRON_LM"):
        raise InputError("Megatron-LM is not supported; unset ACCELERATE_USE_MEGATRON_LM.")
    n_here, n_gpus = local_world_size(), torch.accelerator.device_count() if uses_gpu() else 0
    if 1 < n_gpus < n_here:
        raise InputError(
            f"{n_here} processes for {n_gpus} GPUs on this machine; start at most {n_gpus} (GPUS={n_gpus})."
        )


def _refuse_leftovers() -> None:
    """Raise InputError for a variable that makes accelerate start a process group that no launcher has prepared."""
    left = [name for name in _WORLD_SIZE_VARIABLES if os.environ.get(name, "1") not in ("-1", "0", "1")]
    if os.environ.get("LOCAL_RANK", "-1") != "-1":
        left.insert(0, "LOCAL_RANK")
    if left:
        raise InputError(
            f"{left[0]}={os.environ[left[0]]} is set, but not all variables of a launcher; unset {' and '.join(left)}, "
            "or start with torchrun or `accelerate launch`."
        )


def _uses_cpu() -> bool:
    """Return whether the launcher asks for the CPU."""
    return _is_set("ACCELERATE_USE_CPU")


def _is_set(variable: str) -> bool:
    """Return whether a launcher's variable is true. Raises InputError if it is neither true nor false."""
    value = os.environ.get(variable, "false")
    if value.lower() not in _TRUE + _FALSE:
        raise InputError(f"the variable {variable} is {value!r}, neither true nor false; unset it.")
    return value.lower() in _TRUE
