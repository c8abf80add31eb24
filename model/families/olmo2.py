"""OLMo 2: queries and keys are normalised over all heads together."""

from model.families.family import Family, HeadNorms

NORMS = HeadNorms("q_norm", "k_norm", "flat")
FAMILY = Family("olmo2", absent_n_kv_heads="n_heads", head_norms=NORMS)
