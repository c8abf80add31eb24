"""Phi 1 to 2: biases everywhere, an output projection called `dense`, and optional norms that all heads share."""

from model.families.family import Family

NORMS = tuple(f"{name}_layernorm.{kind}" for name in "qk" for kind in ("weight", "bias"))
FAMILY = Family("phi", absent_n_kv_heads="n_heads", output="dense", not_per_head=NORMS, rotated=0.5)
