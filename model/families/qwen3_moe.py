"""Qwen 3 with experts, which are copied: as Qwen 3."""

from model.families.family import Family

FAMILY = Family(
    "qwen3_moe", absent_n_kv_heads=4, null_n_kv_heads="refused", not_per_head=("q_norm.weight", "k_norm.weight")
)
