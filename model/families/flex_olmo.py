"""FlexOlmo: as OLMo 2, with experts, which are copied."""

from model.families.family import Family, HeadNorms

NORMS = HeadNorms("q_norm", "k_norm", "flat")
FAMILY = Family("flex_olmo", absent_n_kv_heads="n_heads", head_norms=NORMS)
