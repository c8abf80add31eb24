"""Qwen 3: one norm for the queries and one for the keys, each shared by all heads."""

from model.families.family import Family

FAMILY = Family("qwen3", absent_n_kv_heads=32, absent_head_dim=128, not_per_head=("q_norm.weight", "k_norm.weight"))
