"""FSDP2: models in shards, each process with its own of every parameter, gradient and optimizer state."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from uptrain.distributed.collectives import on_main

Model = TypeVar("Model", bound=nn.Module)


def fsdp_plugin(precision: str, block_names: Sequence[str]) -> FullyShardedDataParallelPlugin:
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


def load_on_main(
    accelerator: Accelerator, read: Callable[[], Model], empty: Callable[[], Model]
) -> tuple[Model, dict[str, Any]]:
    """Read a model; return it, and the weights that `broadcast_weights` is to give it when it is in shards.

    Where models are sharded, the main process alone reads it, so that the machine need not hold it many times; in the
    others it is empty.
    """
    if not is_sharded(accelerator):
        return read(), {}
    found: list[Model] = []
    on_main(accelerator, lambda: found.append(read()))
    return (found[0], found[0].state_dict()) if found else (empty(), {})


def broadcast_weights(accelerator: Accelerator, model: nn.Module, weights: dict[str, Any]) -> None:
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
