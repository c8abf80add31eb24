"""Apertus: Qwen 3's layout, with another activation."""

from model.families.family import Family

FAMILY = Family("apertus", absent_n_kv_heads="n_heads", not_per_head=("q_norm.weight", "k_norm.weight"))
