"""Command R and Aya: optionally a norm for each head of queries and keys, all in one matrix."""

from model.families.family import Family, HeadNorms

NORMS = HeadNorms("q_norm", "k_norm", "matrix")
FAMILY = Family("cohere", absent_n_kv_heads="n_heads", head_norms=NORMS)
