"""Arcee (AFM): Llama's layout, with another activation."""

from model.families.family import Family

FAMILY = Family("arcee", absent_n_kv_heads="n_heads", rotated=1.0)
