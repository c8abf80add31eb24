"""Write a Llama with more K/V heads that computes the same: repeated heads, each in coordinates of its own.

The control of a merge: a good merge of the repeated heads gives back the model.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def repeat_heads(source: Path, out: Path, n_kv_heads: int) -> None:
    """Write the Llama in `source` (one safetensors file, no biases) with `n_kv_heads` heads to the folder `out`.

    A repeated key is rotated by a random angle in each pair of dimensions that RoPE rotates together; its query heads
    are rotated alike, so that their products stay. A repeated value is rotated by a random orthogonal matrix; the
    output projection undoes it. Each K/V head must be repeated equally often.
    """
    config = json.loads((source / "config.json").read_text())
    head_dim, n_heads = config["head_dim"], config["num_attention_heads"]
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        q, k, v, o = (f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkvo")
        angles_KP = torch.rand(n_kv_heads, head_dim // 2, generator=generator, dtype=torch.float64) * 2 * torch.pi
        values_KDD = torch.linalg.qr(torch.randn(n_kv_heads, head_dim, head_dim, generator=generator).double())[0]
        per_head = n_heads // n_kv_heads
        tensors[k] = _rotated(_repeated(tensors[k], head_dim, n_kv_heads), angles_KP).to(tensors[k].dtype)
        queries = tensors[q].double().unflatten(0, (n_heads, head_dim))
        tensors[q] = _rotated(queries, angles_KP.repeat_interleave(per_head, 0)).to(tensors[q].dtype)
        values = values_KDD @ _repeated(tensors[v], head_dim, n_kv_heads)
        tensors[v] = values.flatten(0, 1).to(tensors[v].dtype)
        read = tensors[o].double().unflatten(1, (n_heads, head_dim))
        back = torch.einsum("mhd,hed->mhe", read, values_KDD.repeat_interleave(per_head, 0))
        tensors[o] = back.flatten(1).to(tensors[o].dtype)
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"num_key_value_heads": n_kv_heads}, indent=2) + "\n")


def _repeated(weight: Tensor, head_dim: int, n_kv_heads: int) -> Tensor:
    """Return [n_kv_heads, head_dim, inputs]: each head of `weight` as often as needed, in float64."""
    heads: Tensor = weight.double().unflatten(0, (-1, head_dim))
    return heads.repeat_interleave(n_kv_heads // len(heads), 0)


def _rotated(heads_HDM: Tensor, angles_HP: Tensor) -> Tensor:
    """Rotate dimension i of each head with dimension i + half, as RoPE in halves does; return [heads · D, M]."""
    first, second = heads_HDM.chunk(2, 1)
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles_HP), angles_HP)[:, :, None]
    return torch.cat([rotated.real, rotated.imag], 1).flatten(0, 1)
