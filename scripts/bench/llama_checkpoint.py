"""Write Llama checkpoints of any size: of random numbers, or sparse ones of headers alone."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SHARD_BYTES = 10_000_000_000
Sizes = dict[str, tuple[int, ...]]
"""Name → shape of each tensor of a shard."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama in bfloat16."""

    name: str
    hidden: int
    layers: int
    heads: int
    mlp: int
    vocab: int

    @property
    def nbytes(self) -> int:
        """Bytes with a K/V head for each query head."""
        return 2 * sum(prod(size) for _, size in self.tensors(self.heads))

    def of_size(self, nbytes: float) -> "Shape":
        """Return the shape with as many layers as take about this many bytes in all, at least one."""
        outside, with_one = (replace(self, layers=n).nbytes for n in (0, 1))
        return replace(self, layers=max(1, round((nbytes - outside) / (with_one - outside))))

    def config(self, n_kv_heads: int) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.mlp, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": n_kv_heads, "vocab_size": self.vocab, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        }  # fmt: skip

    def tensors(self, n_kv_heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        kv = self.hidden // self.heads * n_kv_heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            for part, rows in {"q": self.hidden, "k": kv, "v": kv, "o": self.hidden}.items():
                yield f"{name}.self_attn.{part}_proj.weight", (rows, self.hidden)
            yield f"{name}.mlp.gate_proj.weight", (self.mlp, self.hidden)
            yield f"{name}.mlp.up_proj.weight", (self.mlp, self.hidden)
            yield f"{name}.mlp.down_proj.weight", (self.hidden, self.mlp)
            yield f"{name}.input_layernorm.weight", (self.hidden,)
            yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)


TINY_LLAMA = Shape("TinyLlama", 2048, 22, 32, 5632, 32000)
LLAMA_2_7B = Shape("Llama-2-7B", 4096, 32, 32, 11008, 32000)


def write_random(shape: Shape, folder: Path, layers_per_shard: int = 3) -> int:
    """Write a checkpoint of random numbers, with a K/V head for each query head; return the bytes of its tensors."""
    rng = np.random.default_rng(0)

    def write_shard(path: Path, sizes: Sizes) -> None:
        tensors = {name: _random_bf16(rng, size) for name, size in sizes.items()}
        save_file(tensors, path, metadata={"format": "pt"})

    shards: list[Sizes] = [{} for _ in range(0, shape.layers, layers_per_shard)]
    for name, size in shape.tensors(shape.heads):
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        shards[layer // layers_per_shard][name] = size
    _write(shape, shape.heads, folder, shards, write_shard)
    return shape.nbytes


def write_sparse(shape: Shape, n_kv_heads: int, folder: Path) -> Path:
    """Write a checkpoint of headers: the files have their full length, and take no space."""
    shards: list[Sizes] = [{}]
    filled = 0
    for name, size in shape.tensors(n_kv_heads):
        nbytes = 2 * prod(size)
        if filled and filled + nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = size
        filled += nbytes
    _write(shape, n_kv_heads, folder, shards, _write_header)
    return folder


def _write(
    shape: Shape, n_kv_heads: int, folder: Path, shards: list[Sizes], write_shard: Callable[[Path, Sizes], None]
) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config(n_kv_heads), indent=2))
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(shards, start=1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(path, sizes)
        weight_map |= dict.fromkeys(sizes, path.name)
    total = 2 * sum(prod(size) for sizes in shards for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random_bf16(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Return small numbers: random signs and mantissas around 2^-6."""
    bits = rng.integers(0, 1 << 16, size=size, dtype=np.uint16)
    return ((bits & 0x80FF) | np.uint16(0x3C00)).view(ml_dtypes.bfloat16)


def _write_header(path: Path, sizes: Sizes) -> None:
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [end, end + 2 * prod(size)]}
        end += 2 * prod(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
