"""Write tiny checkpoints in the formats that torch.save is the base of, the way their makers do."""

import json
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
META_SHAPE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 64}
"""Of a model that Meta's params.json can describe in several parts."""


def cast(model: PreTrainedModel, dtype: str) -> dict[str, Tensor]:
    """Return the state dict in a dtype; tensors that are one stay one."""
    done: dict[int, Tensor] = {}
    return {n: done.setdefault(t.data_ptr(), t.detach().to(DTYPES[dtype])) for n, t in model.state_dict().items()}


def bits(tensor: Tensor) -> bytes:
    """Return a tensor's bytes in order."""
    data: bytes = (
        tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
    )
    return data


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
        convert("mha-to-gqa", "--method", "mean", path, out, "--groups", groups).succeeded()
    convert("verify", other, outs[1]).succeeded()
    expected, written = tiny.tensors(outs[0]), tiny.tensors(outs[1])
    assert expected.keys() == written.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == written[name].dtype, name
        assert torch.equal(tensor, written[name]), name


def in_pairs(w: Tensor, n_heads: int) -> Tensor:
    """Bring Hugging Face's half-split rows into Meta's order of pairs (the inverse of transformers' `permute`)."""
    return w.view(n_heads, 2, w.shape[0] // n_heads // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)


META_NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


def meta_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"layers.{layer}.{META_NAMES[part]}.weight"
    return f"{META_NAMES[stem]}.weight"


def meta_parts(model: PreTrainedModel, n_files: int, dtype: str, llama3: bool, fused: bool) -> list[dict[str, Tensor]]:
    """Cut a Llama as Meta's model parallelism does, a dict per file."""
    config = model.config
    heads = {"attention.wq": config.num_attention_heads, "attention.wk": config.num_key_value_heads}
    files: list[dict[str, Tensor]] = [{} for _ in range(n_files)]
    for name, w in cast(model, dtype).items():
        meta = meta_name(name)
        part = meta.removesuffix(".weight").split(".", 2)[-1]
        for i, piece in enumerate(cut(in_pairs(w, heads[part]) if part in heads else w, part, n_files, config, llama3)):
            files[i][meta] = piece.clone()
    for file in files:
        file["rope.freqs"] = torch.ones(config.head_dim // 2)
        for layer in range(config.num_hidden_layers if fused else 0):
            three = [file.pop(f"layers.{layer}.attention.w{x}.weight") for x in "qkv"]
            file[f"layers.{layer}.attention.wqkv.weight"] = torch.cat(three)
    return files


def cut(w: Tensor, part: str, n_files: int, config: Any, llama3: bool) -> list[Tensor]:
    if part in ("attention.wk", "attention.wv") and n_files > config.num_key_value_heads:
        times = n_files // config.num_key_value_heads
        return [head for head in w.chunk(config.num_key_value_heads) for _ in range(times)]
    if part.endswith("norm"):
        return [w] * n_files
    by_columns = part in ("attention.wo", "feed_forward.w2") or (part == "tok_embeddings" and not llama3)
    assert w.shape[int(by_columns)] % n_files == 0
    return list(w.chunk(n_files, dim=int(by_columns)))


def write_meta(
    folder: Path, model: PreTrainedModel, n_files: int = 1, dtype: str = "float32", llama3: bool = False,
    fused: bool = False, **params: Any,
) -> Path:  # fmt: skip
    """Write a folder as Meta distributes Llamas; `params` adds or replaces keys of params.json, `...` removes one."""
    folder.mkdir(parents=True)
    for i, tensors in enumerate(meta_parts(model, n_files, dtype, llama3, fused)):
        torch.save(tensors, folder / f"consolidated.{i:02d}.pth")
    config, n_kv_heads = model.config, model.config.num_key_value_heads
    values = {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "multiple_of": 256, "norm_eps": config.rms_norm_eps, "vocab_size": -1,
        **({"n_kv_heads": n_kv_heads} if n_kv_heads < config.num_attention_heads else {}),
        **params,
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    (folder / "tokenizer.model").write_bytes(b"\x0apieces")
    for name in ("checklist.chk", "tokenizer_checklist.chk"):
        (folder / name).write_text("md5 of files that are not copied\n")
    return folder


def write_dcp(
    folder: Path, tensors: dict[str, Tensor], n_pieces: int = 1, axis: int = 0, **others: Tensor
) -> Path:  # fmt: skip
    """Write a torch.distributed.checkpoint as `n_pieces` processes do, each its part of every tensor along `axis`."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, places = {}, {}
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"__{i}_0.distcp").open("wb")) for i in range(n_pieces)]
        for name, tensor in {**tensors, **others}.items():
            chunks = []
            along = min(axis, tensor.dim() - 1)
            position = 0
            for piece, file in zip(
                tensor.tensor_split(n_pieces, along) if tensor.dim() else [tensor], files, strict=False
            ):
                start = [0] * tensor.dim()
                if start:
                    start[along], position = position, position + piece.shape[along]
                begin = file.tell()
                torch.save(piece.clone(), file)
                place = _StorageInfo(Path(file.name).name, begin, file.tell() - begin)
                places[MetadataIndex(name, torch.Size(start))] = place
                chunks.append(ChunkStorageMetadata(torch.Size(start), piece.shape))
            entries[name] = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.size(), chunks)
    entries["step"] = BytesStorageMetadata()
    metadata = Metadata(entries, storage_data=places, storage_meta=StorageMeta(folder))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder
