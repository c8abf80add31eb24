"""Helium: Llama's layout."""

from model.families.family import Family

FAMILY = Family("helium", absent_n_kv_heads=20, null_n_kv_heads="refused", absent_head_dim=128)
