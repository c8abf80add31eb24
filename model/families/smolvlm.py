"""SmolVLM: as Idefics 3."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "smolvlm",
    text_config="text_config",
    absent_text_type="llama",
    prefix=r"(?:model\.)?text_model\.",
    others=r"(?:model\.)?vision_model\.",
)
