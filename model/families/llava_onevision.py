"""LLaVA-OneVision: as LLaVA, around Qwen 2."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "llava_onevision",
    text_config="text_config",
    absent_text_type="qwen2",
    prefix=r"language_model\.(?:model\.)?|model\.language_model\.",  # the last since transformers 4.52
    others=r"(?:model\.)?vision_tower\.",
)
