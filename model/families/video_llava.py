"""Video-LLaVA: as LLaVA, with a tower for images and one for videos."""

from model.families.family import Wrapper

FAMILY = Wrapper(
    "video_llava",
    text_config="text_config",
    absent_text_type="llama",
    prefix=r"language_model\.(?:model\.)?|model\.language_model\.",  # the last since transformers 4.52
    others=r"(?:model\.)?(?:image|video)_tower\.",
)
