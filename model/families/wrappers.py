"""Define the models that contain a language model of a family, one entry each. Only that model's heads are merged."""

from model.families.family import Wrapper

LLAVA_PREFIX = r"language_model\.(?:model\.)?|model\.language_model\."
"""Two spellings; the second since transformers 4.52."""
VISION_TOWER = r"(?:model\.)?vision_tower\."

WRAPPERS = (
    # Aya Vision: as LLaVA, around Cohere 2.
    Wrapper(
        "aya_vision",
        text_config="text_config",
        default_text_type="cohere2",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # Gemma 3, 4B to 27B: as LLaVA, around Gemma 3's language model.
    Wrapper(
        "gemma3",
        text_config="text_config",
        default_text_type="gemma3_text",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # Idefics 2: a language model under `text_model`, a vision model, and a resampler with K/V heads of its own.
    Wrapper(
        "idefics2",
        text_config="text_config",
        default_text_type="mistral",
        prefix=r"(?:model\.)?text_model\.",
        other_towers=r"(?:model\.)?(?:vision_model|connector)\.",
    ),
    # Idefics 3 and the first SmolVLM: a language model under `text_model`, and a vision model.
    Wrapper(
        "idefics3",
        text_config="text_config",
        default_text_type="llama",
        prefix=r"(?:model\.)?text_model\.",
        other_towers=r"(?:model\.)?vision_model\.",
    ),
    # LLaVA 1.5 and its relatives: a language model under `language_model`, and a vision tower.
    Wrapper(
        "llava",
        text_config="text_config",
        default_text_type="llama",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # LLaVA 1.6: as LLaVA.
    Wrapper(
        "llava_next",
        text_config="text_config",
        default_text_type="llama",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # LLaVA-NeXT-Video: as LLaVA.
    Wrapper(
        "llava_next_video",
        text_config="text_config",
        default_text_type="llama",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # LLaVA-OneVision: as LLaVA, around Qwen 2.
    Wrapper(
        "llava_onevision",
        text_config="text_config",
        default_text_type="qwen2",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # Mistral Small 3.1 and Ministral 3: as LLaVA, around Mistral or Ministral 3.
    Wrapper(
        "mistral3",
        text_config="text_config",
        default_text_type="mistral",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # PaliGemma: as LLaVA, around Gemma or Gemma 2.
    Wrapper(
        "paligemma",
        text_config="text_config",
        default_text_type="gemma",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
    # SmolVLM: as Idefics 3.
    Wrapper(
        "smolvlm",
        text_config="text_config",
        default_text_type="llama",
        prefix=r"(?:model\.)?text_model\.",
        other_towers=r"(?:model\.)?vision_model\.",
    ),
    # Video-LLaVA: as LLaVA, with a tower for images and one for videos.
    Wrapper(
        "video_llava",
        text_config="text_config",
        default_text_type="llama",
        prefix=LLAVA_PREFIX,
        other_towers=r"(?:model\.)?(?:image|video)_tower\.",
    ),
    # VipLLaVA: as LLaVA.
    Wrapper(
        "vipllava",
        text_config="text_config",
        default_text_type="llama",
        prefix=LLAVA_PREFIX,
        other_towers=VISION_TOWER,
    ),
)
