"""A teacher in shards: each layer is whole only while it runs."""

from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from model import load_model
from uptrain.distributed.fsdp import place_teacher
from uptrain.models.decoder_layers import decoder_layers


@pytest.fixture
def accelerator():
    """Return one process that shards over itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
    dist.destroy_process_group()


def test_a_replica_has_a_whole_teacher_in_shards(tmp_path, accelerator):
    """Else each layer would be gathered from all nodes."""
    accelerator.torch_device_mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard_cp"))
    teacher = load_model(tiny.save(tiny.build(), tmp_path / "model")).requires_grad_(False)
    place_teacher(accelerator, teacher, decoder_layers(teacher), lambda layer: ())
    meshes = {
        parameter.device_mesh.mesh_dim_names for layer in decoder_layers(teacher) for parameter in layer.parameters()
    }
    assert meshes == {("dp_shard_cp",)}


@pytest.mark.parametrize("family", ["llama", "phi"])  # our own code, and transformers' with buffers
def test_layers_are_sharded_again_after_each_forward(tmp_path, accelerator, family):
    folder = tiny.save(tiny.build(family), tmp_path / "model")
    ids, documents = torch.arange(12).view(2, 6), torch.zeros(2, 6, dtype=torch.long)
    teacher = load_model(folder).requires_grad_(False)
    expected = teacher.hidden(ids, documents)
    layers = decoder_layers(teacher)
    assert len(layers) == tiny.N_LAYERS
    place_teacher(accelerator, teacher, layers, lambda layer: ())
    shares = hasattr(fsdp, "share_comm_ctx")  # newer than torch 2.6
    streams = [vars(layer._get_fsdp_state()._comm_ctx).get("all_gather_stream") for layer in layers if shares]
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(teacher.hidden(ids, documents), expected)
        assert all(isinstance(parameter, DTensor) for layer in layers for parameter in layer.parameters())
        # torch's own record, until a backward pass: a long run would fill the host's memory
        if hasattr(layers[0], "reset_iter_state"):  # torch 2.13 and later
            assert not any(layer._get_fsdp_state()._comm_ctx.post_forward_order for layer in layers)
    assert not isinstance(teacher.lm_head_weight, DTensor)
    if shares:
        contexts = [layer._get_fsdp_state()._comm_ctx for layer in layers]
        assert len({id(context) for context in contexts}) == 1
        # Each stream would have memory of its own.
        assert streams == [contexts[0].all_gather_stream] * len(layers) and None not in streams
