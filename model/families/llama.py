"""Llama 1 to 3, Vicuna, CodeLlama, OpenLLaMA, SmolLM, and everything else that says `"model_type": "llama"`."""

from model.families.family import Family

FAMILY = Family("llama", absent_n_kv_heads=None)
