"""Configure FSDP2, and load and place models under it: each rank holds a shard of every tensor."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from uptrain.distributed.collectives import on_main

Model = TypeVar("Model", bound=nn.Module)


def fsdp_plugin(precision: str, layer_class_names: Sequence[str]) -> FullyShardedDataParallelPlugin:
    """Return the settings of FSDP2. accelerate's defaults would sum gradients and round the loss in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = torch.bfloat16 if precision == "bf16" else None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(layer_class_names),
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        cpu_offload=False,
        activation_checkpointing=False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, output_dtype=None),
    )


def is_sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def load_on_main(
    accelerator: Accelerator, load: Callable[[], Model], make_uninitialized: Callable[[], Model]
) -> tuple[Model, dict[str, Any]]:
    """Load a model; return it, and the weights to pass to `broadcast_weights` once it is sharded.

    Under FSDP only the main process loads the model, so that the host holds it once; the other ranks return
    that of `make_uninitialized`. Without FSDP every rank loads it, and the weights are empty.
    """
    if not is_sharded(accelerator):
        return load(), {}
    loaded: list[Model] = []
    on_main(accelerator, lambda: loaded.append(load()))
    return (loaded[0], loaded[0].state_dict()) if loaded else (make_uninitialized(), {})


def broadcast_weights(accelerator: Accelerator, model: nn.Module, weights: dict[str, Any]) -> None:
    """Distribute the weights of the main process to the shards of all ranks; does nothing without FSDP."""
    if is_sharded(accelerator):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)


def place_teacher(
    accelerator: Accelerator,
    teacher: nn.Module,
    layers: Sequence[nn.Module],
    owners_of: Callable[[nn.Module], Sequence[nn.Module]],
) -> None:
    """Move a teacher to the device. Under FSDP shard its layers, but not its embedding and LM head.

    Layers are moved from the CPU one at a time, since the device may be too small for the whole model. `owners_of`
    returns the student's layers whose parameters a layer uses.
    """
    if not is_sharded(accelerator):
        teacher.to(accelerator.device)
        return
    from torch.distributed import fsdp
    from torch.distributed.tensor import DTensor

    own = [layer for layer in layers if next(layer.parameters(), None) is not None]
    # With replicas of shards (accelerate's names), gradients are not to be reduced here, so a mesh of shards will do.
    mesh = getattr(accelerator, "torch_device_mesh", None)
    where = {} if mesh is None else {"mesh": mesh["dp_shard_cp"]}
    # explicit: each layer is a root, which is not resharded by default
    sharded = [fsdp.fully_shard(layer, reshard_after_forward=True, **where) for layer in own]
    for layer in own:
        _forget_forward_passes(layer)
    if hasattr(fsdp, "share_comm_ctx"):  # newer than torch 2.6
        # Else each layer would gather on streams of its own, and the allocator keeps memory for each stream.
        fsdp.share_comm_ctx(sharded)
        # The first forward pass of each layer would replace the streams of all by new ones.
        for layer in own:
            layer._get_fsdp_state()._lazy_init()  # type: ignore[operator]
    for layer in layers:
        _gather_while_running(layer, owners_of(layer))
    for tensor in (*teacher.parameters(), *teacher.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(accelerator.device)


def _forget_forward_passes(layer: nn.Module) -> None:
    """Drop what torch records of a forward pass until the backward pass, which a teacher never has."""
    if hasattr(layer, "reset_iter_state"):  # torch 2.13 and later
        layer.register_forward_hook(lambda *_: layer.reset_iter_state())  # type: ignore[operator]


def _gather_while_running(layer: nn.Module, owners: Sequence[nn.Module]) -> None:
    """Gather the shards of `owners`, sharded layers of the student, while `layer` of the teacher runs."""

    def gather(*_: object) -> None:
        for owner in owners:
            owner.unshard()  # type: ignore[operator]

    def shard(*_: object) -> None:
        for owner in owners:
            owner.reshard()  # type: ignore[operator]

    if owners:
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(shard)
