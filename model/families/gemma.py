"""Gemma and CodeGemma: Llama's layout with a head size of its own."""

from model.families.family import Family

SIZES = {"hidden_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28}
FAMILY = Family(
    "gemma", absent_n_kv_heads=16, null_n_kv_heads="refused", absent_head_dim=256, absent_sizes=SIZES, rotated=1.0
)
