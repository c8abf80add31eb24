"""Llama 1 to 3, Vicuna, CodeLlama, OpenLLaMA, SmolLM, and everything else that says `"model_type": "llama"`."""

from model.families.family import Family

SIZES = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 2048,
}  # fmt: skip
FAMILY = Family("llama", absent_n_kv_heads="n_heads", absent_sizes=SIZES, rotated=1.0)
