"""Mistral 7B and its relatives: Llama's layout; the config class assumes 8 K/V heads when nothing is said."""

from model.families.family import Family

FAMILY = Family("mistral", absent_n_kv_heads=8)
