"""Mistral Small 3.1 and Ministral 3: as LLaVA, around Mistral or Ministral 3."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "mistral3",
    text_config="text_config",
    absent_text_type="mistral",
    prefix=r"language_model\.(?:model\.)?|model\.language_model\.",  # the last since transformers 4.52
    others=r"(?:model\.)?vision_tower\.",
)
