"""Idefics 3 and the first SmolVLM: a language model under `text_model`, and a vision model."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "idefics3",
    text_config="text_config",
    absent_text_type="llama",
    prefix=r"(?:model\.)?text_model\.",
    others=r"(?:model\.)?vision_model\.",
)
