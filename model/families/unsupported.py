"""List the model types that cannot be converted, with the reasons. (A survey of the classes of transformers 5.23.)"""

_START_ELSEWHERE = "start from a model of a supported family instead."

# The reason, in a sentence that ends with advice → the model types.
REFUSED: dict[str, tuple[str, ...]] = {
    "its attention is multi-head latent attention (MLA), which caches one small vector for all heads: there are no K/V "
    "heads to merge, and the cache is compressed already; use it as it is.": (
        "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "glm4_moe_lite",
        "glm5_next", "glm_moe_dsa", "hy_v4", "kimi_k2", "kimi_k25", "kimi_linear", "kimi_vl", "longcat",
        "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "youtu",
    ),
    "only some of its layers have attention, the others are linear or recurrent, so there is little K/V cache to save; "
    f"{_START_ELSEWHERE}": (
        "bamba", "falcon_h1", "falcon_mamba", "jamba", "lfm2", "lfm2_moe", "lfm2_vl", "lfm3",
        "lfm3_vl", "mamba", "mamba2", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax", "nemotron_h",
        "nemotron_h_omni", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
        "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
    ),
    "transformers' class for it mixes attention with recurrent layers in any share, also none, and Groupwise does not "
    f"know its layers; {_START_ELSEWHERE}": ("granitemoehybrid",),
    "its language model reads images through a Q-Former, whose layout Groupwise does not know; "
    f"{_START_ELSEWHERE}": ("blip-2", "instructblip", "instructblipvideo"),
    "some of its layers read the K/V heads of other layers, so they cannot be merged layer by layer; "
    f"{_START_ELSEWHERE}": (
        "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text",
    ),
    "some of its layers attend to an image instead of the text, with K/V heads of their own that are not merged; "
    f"{_START_ELSEWHERE}": (
        "mllama", "mllama_text_model",
    ),
    "tensors of its attention beside K and V depend on the number of K/V heads, and no method merges them; "
    f"{_START_ELSEWHERE}": ("chameleon", "doge"),
    "it is multi-query already: it has one K/V head; use it as it is.": (
        "deepseek_v4",
    ),
    "its class holds one K/V head, or one for each query head (multi_query = false), and no number between; "
    f"{_START_ELSEWHERE}": ("gpt_bigcode",),
    "its heads come in pairs whose attentions are subtracted, so that merging neighbours would mix the two; "
    f"{_START_ELSEWHERE}": ("diffllama",),
    "its experts share the K/V heads, and the number of query heads follows from theirs, so it cannot have fewer; "
    f"{_START_ELSEWHERE}": ("jetmoe",),
    "transformers' class for it has no number of K/V heads, so it could not open the result; "
    f"{_START_ELSEWHERE}": (
        "bark", "bart", "bert", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "camembert",
        "codegen", "ctrl", "electra", "fuyu", "gpt-sw3", "gpt2", "gpt_neo", "gpt_neox_japanese", "gptj", "longt5",
        "m2m_100", "marian", "mbart", "modernbert-decoder", "mvp", "nllb-moe", "openai-gpt", "opt",
        "pegasus", "persimmon", "plbart", "prophetnet", "roberta", "switch_transformers", "umt5", "whisper", "xglm",
        "xlm-roberta", "xlnet",
    ),
    "it runs its own code, which may ignore the number of K/V heads; rewrite Baichuan2-7B as llama first "
    "(LLaMA-Factory: scripts/convert_ckpt/llamafy_baichuan2.py), and convert that. (The script is wrong for the "
    "others: Baichuan-7B's head is not normalised, and the 13B models use ALiBi.)": ("baichuan",),
    "it runs its own code, which may ignore the number of K/V heads; rewrite it as llama first (LLaMA-Factory: "
    "scripts/convert_ckpt/llamafy_qwen.py), and convert that. (Qwen-VL cannot be rewritten.)": ("qwen",),
    "it runs its own code, which may ignore the number of K/V heads, but its tensors are those of Llama with biases; "
    'set "model_type": "llama", "architectures": ["LlamaForCausalLM"] and "attention_bias", as "bias" is, in its '
    'config.json, set "tokenizer_class": "LlamaTokenizer" and remove "auto_map" in its tokenizer_config.json, and '
    "convert that.": ("internlm",),
    "it runs its own code, which may ignore the number of K/V heads, but its tensors are Llama's; set "
    '"model_type": "llama" and "architectures": ["LlamaForCausalLM"] in its config.json, and convert that.': (
        "xverse",
    ),
    "it runs its own code, which may ignore the number of K/V heads; get the version of GLM-4 made for transformers "
    "(its name ends with -hf).": ("chatglm",),
    "it runs its own code, which may ignore the number of K/V heads; get the version in Llama's format (its name ends "
    "with -llama-format), and convert that.": ("minicpm",),
    f"it runs its own code, which may ignore the number of K/V heads; {_START_ELSEWHERE}": ("internlm2", "xgen"),
    "it is a model as the LLaVA project saves it, which transformers does not open; get the version made for "
    "transformers (on the hub: llava-hf).": ("llava_llama", "llava_mistral", "llava_qwen"),
    "it is Janus or DeepSeek-VL as its own code saves it; get the version made for transformers (on the hub: "
    "deepseek-community).": ("multi_modality",),
    "it is OLMo as its own package saves it; get the version made for transformers (its name ends with -hf).": (
        "hf_olmo",
    ),
    "it is Phi from before transformers had its class; get the newer revision of the model, whose model_type is phi.": (
        "mixformer-sequential", "phi-msft",
    ),
    "it is Falcon from before transformers had its class; get the newer revision of the model, whose model_type is "
    "falcon.": ("RefinedWeb", "RefinedWebModel"),
    "it is Yi from before its authors used Llama's class; get the newer revision of the model, whose model_type is "
    "llama.": ("Yi",),
    "it is StableLM from before transformers had its class; get the newer revision of the model, whose model_type is "
    "stablelm.": ("stablelm_epoch",),
}  # fmt: skip


def unsupported_reason(model_type: object) -> str | None:
    """Return why a model type cannot be converted; None for one that is not listed."""
    return next((text for text, types in REFUSED.items() if model_type in types), None)
