"""SmolLM3: Llama's layout; some layers have no rotary embedding."""

from model.families.family import Family

FAMILY = Family("smollm3", absent_n_kv_heads=4, rotated=1.0, unrotated_every=4)
