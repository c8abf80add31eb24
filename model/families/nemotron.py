"""Nemotron 3 and 4, Minitron: Llama's layout; the class stops where the number of K/V heads is missing."""

from model.families.family import Family

FAMILY = Family("nemotron", absent_n_kv_heads="refused", null_n_kv_heads="refused", rotated=0.5)
