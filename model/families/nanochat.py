"""nanochat: Llama's layout; its norms have no weights."""

from model.families.family import Family

FAMILY = Family("nanochat", absent_n_kv_heads="n_heads")
