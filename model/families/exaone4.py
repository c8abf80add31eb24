"""EXAONE 4: Qwen 3's layout; windows have no weights."""

from model.families.family import Family

FAMILY = Family(
    "exaone4", absent_n_kv_heads=32, null_n_kv_heads="refused", not_per_head=("q_norm.weight", "k_norm.weight")
)
