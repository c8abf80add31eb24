"""Write tiny checkpoints in the formats that torch.save is the base of, the way their makers do."""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def cast(model: PreTrainedModel, dtype: str) -> dict[str, Tensor]:
    """Return the state dict in a dtype; tensors that are one stay one."""
    done: dict[int, Tensor] = {}
    return {n: done.setdefault(t.data_ptr(), t.detach().to(DTYPES[dtype])) for n, t in model.state_dict().items()}


def write_bin(folder: Path, model: PreTrainedModel, dtype: str = "float32", n_shards: int = 1) -> Path:
    """Write a folder with pytorch_model.bin, as transformers 4 did: shared tensors twice, in one shard."""
    tiny.save(model, folder, dtype)
    (folder / "model.safetensors").unlink()
    save_bins(folder, cast(model, dtype), n_shards)
    return folder


def save_bins(folder: Path, tensors: dict[str, Tensor], n_shards: int = 1) -> None:
    if n_shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = sorted(tensors, key=lambda name: (tensors[name].data_ptr(), name))
    weight_map = {}
    for i in range(n_shards):
        file = f"pytorch_model-{i + 1:05d}-of-{n_shards:05d}.bin"
        part = names[i * len(names) // n_shards : (i + 1) * len(names) // n_shards]
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def assert_same_conversion(convert: Any, source: Path, other: Path, place: Path, groups: int) -> None:
    """Convert two sources; their tensors must be equal bit for bit, and `verify` must say so of the second."""
    outs = place / f"a{groups}", place / f"b{groups}"
    for path, out in zip((source, other), outs, strict=True):
        result = convert("mha-to-gqa", path, out, "--groups", groups)
        assert result.code == 0, result.err
    assert convert("verify", other, outs[1]).code == 0
    expected, found = tiny.tensors(outs[0]), tiny.tensors(outs[1])
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype, name
        assert torch.equal(tensor, found[name]), name
