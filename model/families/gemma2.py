"""Gemma 2: as Gemma; windows and caps on logits have no weights."""

from model.families.family import Family

SIZES = {"hidden_size": 2304, "num_attention_heads": 8, "num_hidden_layers": 26}
FAMILY = Family(
    "gemma2", absent_n_kv_heads=4, null_n_kv_heads="refused", absent_head_dim=256, absent_sizes=SIZES, rotated=1.0
)
