"""T5 with grouped heads in its decoder, as our own conversion writes it."""

from dataclasses import replace

from model.families import t5

FAMILY = replace(t5.FAMILY, model_type="t5_gqa")
