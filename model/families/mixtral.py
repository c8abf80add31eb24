"""Mixtral: Mistral's attention; the experts are copied."""

from model.families.family import Family

FAMILY = Family("mixtral", absent_n_kv_heads=8, null_n_kv_heads="refused", rotated=1.0)
