"""Mistral 7B and its relatives: Llama's layout."""

from model.families.family import Family

SIZES = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 131072,
}  # fmt: skip
FAMILY = Family("mistral", absent_n_kv_heads=8, null_n_kv_heads="refused", absent_sizes=SIZES, rotated=1.0)
