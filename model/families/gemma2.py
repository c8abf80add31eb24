"""Gemma 2: as Gemma; windows and caps on logits have no weights."""

from model.families.family import Family

FAMILY = Family("gemma2", absent_n_kv_heads=4, null_n_kv_heads="refused", absent_head_dim=256)
