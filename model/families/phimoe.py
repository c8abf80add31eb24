"""Phi 3.5 MoE: Mixtral's layout; the experts are copied."""

from model.families.family import Family

FAMILY = Family("phimoe", absent_n_kv_heads=8, null_n_kv_heads="refused")
