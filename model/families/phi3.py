"""Phi 3: queries, keys and values in one projection."""

from model.families.family import Family

FAMILY = Family("phi3", absent_n_kv_heads="n_heads", fused="qkv_proj")
