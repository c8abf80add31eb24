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
from reprlib import repr as shortened
from typing import Any

import ml_dtypes
import numpy as np

from model.checkpoint import rope_order
from model.checkpoint.formats.gguf.header import StoredTensor, read_header
from model.checkpoint.formats.gguf.tokenizer import tokenizer_files
from model.checkpoint.hf_folder import json_text, refuse_lfs_pointer
from model.checkpoint.interface import Checkpoint, Shard
from model.checkpoint.llama_config import dtype_settings, llama3_scaling, llama_config, qwen2_config, rope_settings
from model.checkpoint.tensor import Array, Span, TensorInfo
from model.common import checks
from model.common.errors import CheckpointError
from model.common.printable import markdown

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
ROPE_FACTORS = "rope_freqs.weight"
END_OF_TEXT = "<|endoftext|>"

ARCHITECTURES = ("llama", "qwen2")

# The supported keys of an architecture (`llama.*`). Any other key may change the model's output, and is refused.
KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
    "attention.value_length", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
}  # fmt: skip
_OBJECT_BYTES = 10
"""Memory of the vocabulary while a file is opened: Python's objects for each byte of `tokenizer.json`."""


class GGUFFile(Checkpoint):
    """One `.gguf` file of one of ARCHITECTURES."""

    format = "gguf"
    keep_source_shards = False

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_lfs_pointer(path)
        fields, stored = read_header(path)
        self._metadata = _Metadata(path, fields)
        self._content: Array = np.memmap(path, np.uint8, "r")
        llama = self._metadata.architecture == "llama"
        factors = next((t for t in stored if llama and t.name == ROPE_FACTORS), None)
        self._stored = {_hf_name(path, t.name): t for t in stored if t is not factors}
        self.tensors = {name: _describe(path, name, t) for name, t in sorted(self._stored.items())}
        if "model.embed_tokens.weight" not in self.tensors:
            raise CheckpointError(f"{path} lacks the tensor token_embd.weight; the file is incomplete.")
        self.shards = (Shard("model.safetensors", tuple(self.tensors)),)
        self.weight_files = (path,)
        self.config = self._build_config(factors)
        self.config_text = json_text(self.config)
        self.side_files = {
            **tokenizer_files(path, fields),
            "generation_config.json": json_text(self._generation_config()),
            "README.md": _card(fields),
        }
        n_tokens, n_rows = len(fields["tokenizer.ggml.tokens"]), self.tensors["model.embed_tokens.weight"].shape[0]
        if n_tokens > n_rows:
            raise CheckpointError(f"{path} has {n_tokens:,} tokens, but an embedding of {n_rows:,}.")
        del self._metadata
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

    def _build_config(self, rope_factors: StoredTensor | None) -> dict[str, Any]:
        meta = self._metadata
        n_heads, hidden_size = meta.integer("attention.head_count"), meta.integer("embedding_length")
        head_dim = meta.integer("attention.key_length", hidden_size // n_heads)
        if head_dim % 2:
            raise CheckpointError(f"{self.path} has heads of {head_dim} dimensions; RoPE needs an even number.")
        for key in ("rope.dimension_count", "attention.value_length"):
            if meta.integer(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self.path}: {meta.architecture}.{key} differs from the head size {head_dim}; not supported."
                )
        theta = meta.number("rope.freq_base", 10000.0)
        has = self.tensors.__contains__
        if meta.architecture == "qwen2":
            if n_heads * head_dim != hidden_size:
                raise CheckpointError(
                    f"{self.path} has {n_heads} heads of {head_dim}, which is not the width {hidden_size}; "
                    "Qwen 2 has no other."
                )
            self._check_qwen2_biases()
            build = qwen2_config
        else:
            biases = {
                "attention_bias": has("model.layers.0.self_attn.q_proj.bias"),
                "mlp_bias": has("model.layers.0.mlp.gate_proj.bias"),
            }
            build = partial(llama_config, **biases)
        intermediate_size = meta.integer("feed_forward_length")
        for name, tensor in self.tensors.items():
            axis = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.get(name.split(".")[-2])
            is_matrix = axis is not None and name.endswith(".weight")
            if is_matrix and tensor.shape[axis:][:1] != (intermediate_size,):
                raise CheckpointError(
                    f"{self.path} says feed_forward_length = {intermediate_size}, but {name} is {tensor.shape}."
                )
        config = build(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=meta.integer("block_count"),
            num_attention_heads=n_heads,
            num_key_value_heads=meta.integer("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            max_position_embeddings=meta.integer("context_length"),
            rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
            vocab_size=self.tensors["model.embed_tokens.weight"].shape[0],
            tie_word_embeddings=not has("lm_head.weight"),
            **rope_settings(theta, self._rope_scaling(rope_factors, head_dim, theta)),
            **dtype_settings(self.tensors.values()),
        )
        return {**config, **self._special_tokens()}

    def _check_qwen2_biases(self) -> None:
        """Raise CheckpointError unless queries, keys and values have biases, and nothing else has."""
        biased = {name.removesuffix("bias") for name in self.tensors if name.endswith(".bias")}
        expected = {
            name.removesuffix("weight")
            for name in self.tensors
            if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"))
        }
        if wrong := sorted(biased ^ expected):
            problem = "holds" if wrong[0] in biased else "lacks"
            raise CheckpointError(
                f"{self.path} {problem} {wrong[0]}bias. A Qwen 2 has biases of queries, keys and values, and no others."
            )

    def _special_tokens(self) -> dict[str, int]:
        names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
        fields = self._metadata.fields
        return {key: fields[f"tokenizer.ggml.{g}"] for key, g in names.items() if f"tokenizer.ggml.{g}" in fields}

    def _generation_config(self) -> dict[str, Any]:
        """Return the special tokens. A Qwen 2 that answers chats ends a text with either of two tokens."""
        tokens, fields = self._special_tokens(), self._metadata.fields
        vocabulary: list[str] = fields["tokenizer.ggml.tokens"]
        end = vocabulary.index(END_OF_TEXT) if END_OF_TEXT in vocabulary else None
        chats = self._metadata.architecture == "qwen2" and end not in (None, tokens.get("eos_token_id"))
        both = {"eos_token_id": [tokens["eos_token_id"], end]} if chats and "eos_token_id" in tokens else {}
        return {"_from_model_config": True, **tokens, **both}

    def _check_no_scaling(self) -> None:
        """Raise CheckpointError for scaling by a key beside a tensor of factors; config.json has one of the two."""
        meta = self._metadata
        kind = meta.fields.get(f"{meta.architecture}.rope.scaling.type", "none")
        factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
        if kind != "none" and (kind, factor) != ("linear", 1.0):
            raise CheckpointError(
                f"{self.path} scales the rotary embedding twice, by {ROPE_FACTORS} and by the type {shortened(kind)} "
                f"with factor {factor:g}; not supported."
            )

    def _rope_scaling(self, factors: StoredTensor | None, head_dim: int, theta: float) -> dict[str, Any] | None:
        meta = self._metadata
        if factors is not None:
            self._check_no_scaling()
            _describe(self.path, ROPE_FACTORS, factors)
            values = self._stored_rows(factors, 0, factors.shape[0]).astype(np.float64)
            return _llama3_scaling(self.path, values, head_dim, theta)
        kind = meta.fields.get(f"{meta.architecture}.rope.scaling.type", "linear")
        factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            original = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise CheckpointError(
            f"{self.path}: the RoPE scaling {shortened(kind)} is not supported; none, linear and yarn are."
        )


class _Metadata:
    """The keys of a file's architecture, such as `llama.block_count`. Errors name the file and the key."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path, self.fields = path, fields
        self.architecture = fields.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path} is a GGUF of architecture {shortened(self.architecture)}; supported are "
                f"{' and '.join(map(repr, ARCHITECTURES))}."
            )
        if fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {shortened(fields['split.count'])} parts; join them first, with llama.cpp's "
                "llama-gguf-split --merge FIRST_PART WHOLE.gguf."
            )
        for key in fields:
            prefix, _, rest = key.partition(".")
            if prefix == self.architecture and rest not in KEYS:
                raise CheckpointError(
                    f"{path} has the setting {key} = {shortened(fields[key])}, which is not supported."
                )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        return checks.whole_number(value, f"{self.path} has {self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float32 field as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            raise CheckpointError(
                f"{self.path} has {self.architecture}.{key} = {shortened(value)}; it must be a positive number."
            )
        return float(str(np.float32(value)))

    def _get(self, key: str, default: Any) -> Any:
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks {self.architecture}.{key}; the file is incomplete.")
        return value


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


def _llama3_scaling(path: Path, factors: Array, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3.1's RoPE scaling from the per-frequency factors that llama.cpp stores.

    All released Llama 3.1 to 3.3 models use low 1, high 4 and an original context of 8192. Raises CheckpointError for
    anything else.
    """
    refusal = f"{path} has {ROPE_FACTORS} that are not Llama 3.1's; this RoPE is not supported."
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(refusal)
    factor, low, high, context = float(str(np.float32(factors.max()))), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (smooth + (1 - smooth) / factor), rtol=1e-5):
        raise CheckpointError(refusal)
    return llama3_scaling(factor, low, high, context)


def _card(fields: dict[str, Any]) -> bytes:
    """Return a model card with the name and the licence in the file."""
    name = fields.get("general.name", "A GGUF model")
    licence = [f"license: {json.dumps(fields['general.license'])}"] if "general.license" in fields else []
    header = ["---", *licence, "library_name: transformers", "tags: [groupwise]", "---"]
    return "\n".join([*header, "", f"# {markdown(name)}", ""]).encode()
