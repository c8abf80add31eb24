"""GLM-4-0414: as GLM."""

from model.families.family import Family

FAMILY = Family("glm4", absent_n_kv_heads=2, null_n_kv_heads="refused", absent_head_dim=128)
