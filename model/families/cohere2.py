"""Command R7B, Command A and newer Aya: Llama's layout; windows have no weights."""

from model.families.family import Family

SIZES = {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 40}
FAMILY = Family("cohere2", absent_n_kv_heads="n_heads", absent_sizes=SIZES)
