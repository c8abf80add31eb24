"""Translate the tensor names of Meta's Llama into Hugging Face's. torchtitan has the same names."""

import re

# Meta's name → Hugging Face's, and the axis along which the parts are concatenated; None: every file holds all of it.
LAYER: dict[str, tuple[str, int | None]] = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
# The modules whose rows are in Meta's rotary order.
INTERLEAVED = ("attention.wq", "attention.wk")
FUSED, FUSED_PARTS = "attention.wqkv", ("attention.wq", "attention.wk", "attention.wv")
TOP = {"tok_embeddings": "model.embed_tokens", "output": "lm_head", "norm": "model.norm"}

# Tables of the rotary embedding, which can be computed from rope_theta.
BUFFERS = re.compile(r"rope\.freqs|layers\.\d+\.attention\.inner_attention\.rope\.freqs")
NAME = re.compile(r"(?:layers\.(?P<layer>0|[1-9]\d*)\.)?(?P<part>\w+|\w+\.\w+)\.weight")
