"""PaliGemma: as LLaVA, around Gemma or Gemma 2."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "paligemma",
    text_config="text_config",
    absent_text_type="gemma",
    prefix=r"language_model\.(?:model\.)?|model\.language_model\.",  # the last since transformers 4.52
    others=r"(?:model\.)?vision_tower\.",
)
