"""Idefics 2: a language model under `text_model`, a vision model, and a resampler with K/V heads of its own."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "idefics2",
    text_config="text_config",
    absent_text_type="mistral",
    prefix=r"(?:model\.)?text_model\.",
    others=r"(?:model\.)?(?:vision_model|connector)\.",
)
