"""Define the models that contain a language model of a family, one entry each. Only that model's heads are merged.

What an entry does not give are the defaults of `Wrapper`, LLaVA's.
"""

from model.families.family import Wrapper

WRAPPERS = (
    # Aya Vision: as LLaVA, around Cohere 2.
    Wrapper("aya_vision", "cohere2"),
    # Command A Vision: as LLaVA, around Cohere 2.
    Wrapper("cohere2_vision", "cohere2"),
    # DeepSeek-VL 1.3B: as LLaVA, with a vision model of another name.
    Wrapper("deepseek_vl", "llama", other_towers=r"(?:model\.)?vision_model\."),
    # DeepSeek-VL 7B: a second vision model for images of high resolution.
    Wrapper("deepseek_vl_hybrid", "llama", other_towers=r"(?:model\.)?(?:high_res_)?vision_model\."),
    # Gemma 3, 4B to 27B: as LLaVA, around Gemma 3's language model.
    Wrapper("gemma3", "gemma3_text"),
    # GOT-OCR 2: as LLaVA, around Qwen 2.
    Wrapper("got_ocr2", "qwen2"),
    # Idefics 2: a language model under `text_model`, a vision model, and a resampler with K/V heads of its own.
    Wrapper(
        "idefics2",
        default_text_type="mistral",
        prefix=r"(?:model\.)?text_model\.",
        other_towers=r"(?:model\.)?(?:vision_model|connector)\.",
    ),
    # Idefics 3 and the first SmolVLM: a language model under `text_model`, and a vision model.
    Wrapper(
        "idefics3",
        default_text_type="llama",
        prefix=r"(?:model\.)?text_model\.",
        other_towers=r"(?:model\.)?vision_model\.",
    ),
    # InternVL 2.5 and 3: as LLaVA, around Qwen 2, Llama or Qwen 3.
    Wrapper("internvl", "qwen2"),
    # Janus and Janus-Pro: a vision model, and one that generates images.
    Wrapper("janus", "llama", other_towers=r"(?:model\.)?(?:vision_model|vqmodel)\."),
    # LLaVA 1.5 and its relatives: a language model under `language_model`, and a vision tower.
    Wrapper("llava", "llama"),
    # LLaVA 1.6: as LLaVA.
    Wrapper("llava_next", "llama"),
    # LLaVA-NeXT-Video: as LLaVA.
    Wrapper("llava_next_video", "llama"),
    # LLaVA-OneVision: as LLaVA, around Qwen 2.
    Wrapper("llava_onevision", "qwen2"),
    # Mistral Small 3.1 and Ministral 3: as LLaVA, around Mistral or Ministral 3.
    Wrapper("mistral3", "mistral"),
    # Ovis 2: as LLaVA, around Qwen 2.
    Wrapper("ovis2", "qwen2"),
    # PaliGemma: as LLaVA, around Gemma or Gemma 2. The tokens of a prompt attend to all others of it.
    Wrapper("paligemma", "gemma", is_causal=False),
    # Qwen2-Audio: as LLaVA, with a tower for sound.
    Wrapper("qwen2_audio", "qwen2", other_towers=r"(?:model\.)?audio_tower\."),
    # Qwen3-VL: as LLaVA, around a language model that is Qwen 3 on text: there, the three positions of a token that its
    # rotary embedding knows (in time, height and width) are one.
    Wrapper(
        "qwen3_vl",
        default_text_type="qwen3_vl_text",
        other_towers=r"(?:model\.)?visual\.",
        text_types={"qwen3_vl_text": "qwen3"},
        text_defaults={"rope_theta": 500000.0, "max_position_embeddings": 128000},
    ),
    # SmolVLM: as Idefics 3.
    Wrapper(
        "smolvlm",
        default_text_type="llama",
        prefix=r"(?:model\.)?text_model\.",
        other_towers=r"(?:model\.)?vision_model\.",
    ),
    # Video-LLaVA: as LLaVA, with a tower for images and one for videos.
    Wrapper("video_llava", default_text_type="llama", other_towers=r"(?:model\.)?(?:image|video)_tower\."),
    # VipLLaVA: as LLaVA.
    Wrapper("vipllava", "llama"),
)
