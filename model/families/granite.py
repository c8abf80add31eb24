"""Granite: Llama's layout; its multipliers are in the config."""

from model.families.family import Family

FAMILY = Family("granite", absent_n_kv_heads="n_heads", rotated=1.0)
