"""Jais 2: Llama's layout with biases everywhere."""

from model.families.family import Family

FAMILY = Family("jais2", absent_n_kv_heads="n_heads")
