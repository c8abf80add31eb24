"""StableLM 3B and 2: optional biases, and optionally a norm for each head of queries and keys."""

from model.families.family import Family, HeadNorms

NORMS = HeadNorms("q_layernorm", "k_layernorm", "list")
FAMILY = Family("stablelm", absent_n_kv_heads=32, null_n_kv_heads="refused", head_norms=NORMS, rotated=0.25)
