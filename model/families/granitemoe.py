"""Granite 3 with experts, and PowerMoE: Llama's layout; the experts are copied."""

from model.families.family import Family

FAMILY = Family("granitemoe", absent_n_kv_heads="n_heads", rotated=1.0)
