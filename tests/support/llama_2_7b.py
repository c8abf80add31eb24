"""Llama-2-7B without weights: its tensors, and folders of the model and of its default conversion."""

import json
from pathlib import Path

from safetensors_headers import write_headers

from model.checkpoint import TensorInfo

QKVO = frozenset(f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(32) for p in "qkvo")


def llama_2_7b(n_kv_heads: int) -> list[TensorInfo]:
    """Return the tensors of Llama-2-7B with this number of K/V heads."""
    hidden, wide, kv = 4096, 11008, 128 * n_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (32000, hidden),
        "lm_head": (32000, hidden),
        "model.norm": (hidden,),
    }
    for layer in range(32):
        of_layer = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return [TensorInfo(f"{name}.weight", "F16", shape) for name, shape in shapes.items()]


def write_llama_2_7b(folder: Path) -> tuple[Path, Path]:
    """Write the headers of the model after the default conversion to 8 K/V heads, and of its parent."""
    for name, heads in (("gqa8", 8), ("parent", 32)):
        write_headers(folder / name, llama_2_7b(heads))
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": heads, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        (folder / name / "config.json").write_text(json.dumps(config))
    record = {"source": {"name": "Llama-2-7b-hf"}, "method": "fit", "sha256": dict.fromkeys(QKVO, "0" * 64)}
    (folder / "gqa8/groupwise.json").write_text(json.dumps(record))
    return folder / "gqa8", folder / "parent"
