"""Hunyuan, the dense ones: Llama's layout and norms that all heads share."""

from model.families.family import Family

FAMILY = Family(
    "hunyuan_v1_dense", absent_n_kv_heads="n_heads", not_per_head=("query_layernorm.weight", "key_layernorm.weight")
)
