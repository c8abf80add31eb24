"""OLMo 3: as OLMo 2, with sliding windows."""

from model.families.family import Family, HeadNorms

NORMS = HeadNorms("q_norm", "k_norm", "flat")
FAMILY = Family("olmo3", absent_n_kv_heads="n_heads", head_norms=NORMS)
