"""Seed-OSS: Llama's layout with q, k and v biases."""

from model.families.family import Family

FAMILY = Family("seed_oss", absent_n_kv_heads=8, absent_head_dim=128, rotated=1.0)
