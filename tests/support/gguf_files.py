"""Write tiny GGUF files the way llama.cpp's converter does: a Llama's Q and K permuted, its names and metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Bring Hugging Face's half-split rows into llama.cpp's order of pairs."""
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def byte_letters() -> list[str]:
    """Return the 256 characters that byte-level BPE writes bytes as (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    table = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [table[b] for b in range(256)]


def vocabulary(size: int, first: list[str]) -> dict[str, Any]:
    """Return metadata of a small byte-level BPE tokenizer, with the special tokens `first`."""
    tokens = [*first, *byte_letters(), "ab", "ba", *(f"<unused{i}>" for i in range(size))][:size]
    types = [3] * len(first) + [1] * (len(tokens) - len(first))
    return {"model": "gpt2", "pre": "smollm", "tokens": tokens, "types": types, "merges": ["a b", "b a"]}


def write_gguf(path: Path, model: PreTrainedModel, kind: str = "F32", **metadata: Any) -> Path:
    """Write a Llama or Qwen 2; matrices in `kind`, everything else in F32. `metadata` adds or replaces keys."""
    config = model.config
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", config.model_type))
    add_metadata(writer, config, metadata, metadata.pop("first_tokens", None))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w = tensor.float().numpy()
        if config.model_type == "llama" and ".q_proj." in name:
            w = permute(w, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            w = permute(w, config.num_key_value_heads)
        _add(writer, gguf_name(name), w, kind if w.ndim == 2 else "F32")
    if factors := getattr(model, "rope_factors", None):
        _add(writer, "rope_freqs.weight", np.array(factors, np.float32), "F32")
    finish(writer)
    return path


def write_zeros(path: Path, config: Any, shapes: dict[str, tuple[int, ...]], kind: str) -> None:
    """Write a Llama of zeros, which take no memory until they are written."""
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, config, {})
    for name, shape in shapes.items():
        if kind == "F32" or len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.zeros(shape, np.float32))
        else:
            quantised = gguf.GGMLQuantizationType[kind]
            stored = gguf.quant_shape_to_byte_shape(shape, quantised)
            writer.add_tensor(gguf_name(name), np.zeros(stored, np.uint8), raw_dtype=quantised)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(
    writer: gguf.GGUFWriter, config: Any, metadata: dict[str, Any], first_tokens: list[str] | None = None
) -> None:
    family = config.model_type
    facts = {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
    }
    if family == "llama":
        facts |= {
            "llama.attention.key_length": config.head_dim,
            "llama.rope.dimension_count": config.head_dim,
            "llama.vocab_size": config.vocab_size,
        }
    facts |= metadata
    for key, value in facts.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    words = vocabulary(config.vocab_size, first_tokens or ["<|end|>"])
    writer.add_tokenizer_model(words["model"])
    writer.add_string("tokenizer.ggml.pre", "qwen2" if family == "qwen2" else words["pre"])
    writer.add_token_list(words["tokens"])
    writer.add_token_types(words["types"])
    writer.add_token_merges(words["merges"])
    writer.add_eos_token_id(0)


def _add(writer: gguf.GGUFWriter, name: str, w: np.ndarray, kind: str) -> None:
    if kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(w))
    elif kind == "F16":
        writer.add_tensor(name, w.astype(np.float16))
    else:
        quantised = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(w, quantised), raw_dtype=quantised)
