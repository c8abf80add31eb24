"""VipLLaVA: as LLaVA."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "vipllava",
    text_config="text_config",
    absent_text_type="llama",
    prefix=r"language_model\.(?:model\.)?|model\.language_model\.",  # the last since transformers 4.52
    others=r"(?:model\.)?vision_tower\.",
)
