"""Read GGUF files of Llama and Qwen 2 architecture, llama.cpp's format, as the Hugging Face checkpoints they came from.

Quantised weights are dequantised to float32, which holds their values exactly; F32, F16 and BF16 keep their dtype.
llama.cpp stores the rows of a Llama's Q and K in its rotary order (adjacent pairs, where Hugging Face has halves).
That permutation is reversed (llama.cpp, `convert_hf_to_gguf.py`, `LlamaModel.permute`). A Qwen 2's rows are stored in
Hugging Face's order.
"""

import json
import re
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.checkpoint.formats import rope_order
from model.checkpoint.formats.gguf.config import ROPE_FACTORS, ArchitectureKeys, build_config, generation_config
from model.checkpoint.formats.gguf.header import StoredTensor, read_header
from model.checkpoint.formats.gguf.tokenizer import tokenizer_files
from model.checkpoint.hf_folder import refuse_lfs_pointer
from model.checkpoint.interface import Checkpoint, Shard, file_versions
from model.checkpoint.tensor import Array, Span, TensorInfo
from model.common.errors import CheckpointError
from model.common.printable import markdown
from model.common.typed_json import json_bytes
from model.files.names import MODEL_CARD

NOT_QUANTISED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OBJECT_BYTES = 10
"""Memory of the vocabulary while a file is opened: Python's objects for each byte of `tokenizer.json`."""


class GGUFFile(Checkpoint):
    """One `.gguf` file of one of ARCHITECTURES."""

    format = "gguf"
    keep_source_shards = False

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_lfs_pointer(path)
        self.weight_files = (path,)
        self.opened = file_versions(self.weight_files)
        fields, stored = read_header(path)
        keys = ArchitectureKeys(path, fields)
        self._content: Array = np.memmap(path, np.uint8, "r")
        llama = keys.architecture == "llama"
        factors = next((t for t in stored if llama and t.name == ROPE_FACTORS), None)
        self._stored = {_hf_name(path, t.name): t for t in stored if t is not factors}
        self.tensors = {name: _describe(path, name, t) for name, t in sorted(self._stored.items())}
        if "model.embed_tokens.weight" not in self.tensors:
            raise CheckpointError(f"{path} lacks the tensor token_embd.weight; the file is incomplete.")
        self.shards = (Shard("model.safetensors", tuple(self.tensors)),)
        values = None
        if factors is not None:
            _describe(path, ROPE_FACTORS, factors)
            values = self._stored_rows(factors, 0, factors.shape[0]).astype(np.float64)
        self.config = build_config(keys, self.tensors, values)
        self.config_bytes = json_bytes(self.config)
        self.side_files = {
            **tokenizer_files(path, fields),
            "generation_config.json": json_bytes(generation_config(keys)),
            MODEL_CARD: _card(fields),
        }
        n_tokens, n_rows = len(fields["tokenizer.ggml.tokens"]), self.tensors["model.embed_tokens.weight"].shape[0]
        if n_tokens > n_rows:
            raise CheckpointError(f"{path} has {n_tokens:,} tokens, but an embedding of {n_rows:,}.")
        self.reader_bytes = _OBJECT_BYTES * len(bytes(self.side_files["tokenizer.json"]))
        self._heads: dict[str, int] = {}
        if llama:
            self._heads = {
                "q_proj": self.config["num_attention_heads"],
                "k_proj": self.config["num_key_value_heads"],
            }

    def span(self, name: str) -> Span | None:
        if _is_quantised(self._stored[name]) or self._permuted_heads(name):
            return None
        stored = self._stored[name]
        return Span(self.path, stored.offset, stored.nbytes)

    def rows(self, name: str, start: int, stop: int) -> Array:
        n_heads = self._permuted_heads(name)
        if not n_heads:
            return self._stored_rows(self._stored[name], start, stop)
        return rope_order.half_split_rows(
            partial(self._stored_rows, self._stored[name]), self.tensors[name].shape[0] // n_heads, start, stop
        )

    def _stored_rows(self, stored: StoredTensor, start: int, stop: int) -> Array:
        row_bytes = stored.nbytes // stored.shape[0]
        data = self._content[stored.offset + start * row_bytes : stored.offset + stop * row_bytes]
        if not _is_quantised(stored):
            plain: Array = data.view(NOT_QUANTISED[stored.kind])
            return plain.reshape(-1, *stored.shape[1:])
        return _dequantised(
            data.reshape(-1, *stored.shape[1:-1], stored.nbytes // prod(stored.shape[:-1])), stored.kind
        )

    def _permuted_heads(self, name: str) -> int:
        """Return the number of heads of a Q or K tensor, whose rows are permuted; 0 for every other tensor."""
        return int(self._heads.get(name.split(".")[-2], 0))

    def close(self) -> None:
        self._stored.clear()
        del self._content


def matches(path: Path) -> bool:
    return path.is_file() and path.suffix == ".gguf"


def read(path: Path) -> Checkpoint:
    return GGUFFile(path)


def _hf_name(path: Path, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match or match[2] not in NAMES:
        raise CheckpointError(f"{path} holds the tensor {name!r}, which a Llama or Qwen 2 does not have; refused.")
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{NAMES[part]}.{kind}" if layer else f"{NAMES[part]}.{kind}"


def _is_quantised(stored: StoredTensor) -> bool:
    return stored.kind not in NOT_QUANTISED


def _describe(path: Path, name: str, stored: StoredTensor) -> TensorInfo:
    if _is_quantised(stored) and (len(stored.shape) == 1 or not _can_dequantise(stored.kind)):
        shape = "a vector" if len(stored.shape) == 1 else "a matrix"
        raise CheckpointError(f"{path} holds {name}, {shape}, as {stored.kind}, which is not supported.")
    return TensorInfo(name, "F32" if _is_quantised(stored) else stored.kind, stored.shape)


@cache
def _can_dequantise(kind: str) -> bool:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        _dequantised(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantised(data: Array, kind: str) -> Array:
    """Return the values of quantised rows, [..., bytes] → [..., values], in float32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Array = dequantize(data, GGMLQuantizationType[kind])
    return values


def _card(fields: dict[str, Any]) -> bytes:
    """Return a model card with the name and the licence in the file."""
    name = fields.get("general.name", "A GGUF model")
    licence = [f"license: {json.dumps(fields['general.license'])}"] if "general.license" in fields else []
    header = ["---", *licence, "library_name: transformers", "tags: [groupwise]", "---"]
    return "\n".join([*header, "", f"# {markdown(name)}", ""]).encode()
