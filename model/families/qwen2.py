"""Qwen 1.5 and 2: Llama's layout with q, k and v biases; the config class assumes 32 K/V heads when nothing is said."""

from model.families.family import Family

FAMILY = Family("qwen2", absent_n_kv_heads=32)
