"""OLMo: Llama's layout, norms without weights; `clip_qkv` cuts off what the merged heads give, as before."""

from model.families.family import Family

FAMILY = Family("olmo", absent_n_kv_heads="n_heads")
