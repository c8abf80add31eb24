"""Gemma 3, 4B to 27B: as LLaVA, around Gemma 3's language model."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "gemma3",
    text_config="text_config",
    absent_text_type="gemma3_text",
    prefix=r"language_model\.(?:model\.)?|model\.language_model\.",  # the last since transformers 4.52
    others=r"(?:model\.)?vision_tower\.",
)
