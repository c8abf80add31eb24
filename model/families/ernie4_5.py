"""ERNIE 4.5, the dense ones: Llama's layout."""

from model.families.family import Family

FAMILY = Family("ernie4_5", absent_n_kv_heads=2, absent_head_dim=128)
