"""GLM-4 9B and GLM-Edge in transformers' own format: Llama's layout with q, k and v biases."""

from model.families.family import Family

FAMILY = Family("glm", absent_n_kv_heads=2, null_n_kv_heads="refused", absent_head_dim=128)
