"""Ministral 3, its language model: Mistral's layout."""

from model.families.family import Family

SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 34}
FAMILY = Family(
    "ministral3", absent_n_kv_heads=8, null_n_kv_heads="refused", absent_head_dim=128, absent_sizes=SIZES, rotated=1.0
)
