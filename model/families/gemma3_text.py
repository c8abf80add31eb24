"""Gemma 3 1B, and the language model of the others: Gemma's layout, and norms that all heads share."""

from model.families.family import Family

SIZES = {"hidden_size": 2304, "num_attention_heads": 8, "num_hidden_layers": 26}
FAMILY = Family(
    "gemma3_text",
    absent_n_kv_heads=4,
    null_n_kv_heads="refused",
    absent_head_dim=256,
    not_per_head=("q_norm.weight", "k_norm.weight"),
    absent_sizes=SIZES,
)
