"""Qwen 1.5 and 2: Llama's layout with q, k and v biases."""

from model.families.family import Family

SIZES = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 32768,
}  # fmt: skip
FAMILY = Family("qwen2", absent_n_kv_heads=32, absent_sizes=SIZES, rotated=1.0)
