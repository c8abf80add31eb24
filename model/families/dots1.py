"""dots.llm1: Qwen 3's layout, with experts, which are copied."""

from model.families.family import Family

FAMILY = Family("dots1", absent_n_kv_heads=32, not_per_head=("q_norm.weight", "k_norm.weight"))
