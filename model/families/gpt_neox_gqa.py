"""GPT-NeoX with grouped heads, as our own conversion writes it."""

from dataclasses import replace

from model.families import gpt_neox

FAMILY = replace(gpt_neox.FAMILY, model_type="gpt_neox_gqa")
