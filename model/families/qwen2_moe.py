"""Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2's attention; the experts are copied."""

from model.families.family import Family

FAMILY = Family("qwen2_moe", absent_n_kv_heads=16, null_n_kv_heads="refused", rotated=1.0)
