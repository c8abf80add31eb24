"""gpt-oss: Llama's layout with biases, and a sink for each query head, which stays."""

from model.families.family import Family

FAMILY = Family("gpt_oss", absent_n_kv_heads=8, null_n_kv_heads="refused", absent_head_dim=64, not_per_head=("sinks",))
