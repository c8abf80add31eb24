"""Gemma and CodeGemma: Llama's layout with a head size of its own."""

from model.families.family import Family

FAMILY = Family("gemma", absent_n_kv_heads=16, null_n_kv_heads="refused", absent_head_dim=256)
