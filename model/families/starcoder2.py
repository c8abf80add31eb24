"""StarCoder 2: Llama's layout with biases everywhere."""

from model.families.family import Family

FAMILY = Family("starcoder2", absent_n_kv_heads=2, null_n_kv_heads="refused", rotated=1.0)
