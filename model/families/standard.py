"""Define the families that an entry of a few lines describes, by what differs from Llama.

The defaults of `Family`, `TensorNames` and `PositionEncoding` are Llama's. A family with code, a switch or
config keys of its own has its own file.
"""

from model.families.family import Family, HeadNorms, PositionEncoding, TensorNames

SHARED_NORMS = HeadNorms("q_norm", "k_norm", "shared")
FLAT_NORMS = HeadNorms("q_norm", "k_norm", "flat")
INTERLEAVED = PositionEncoding(rotary_pairing="interleaved")
NO_ATTENTION_NORM = TensorNames(attention_norm=None)

STANDARD = (
    # Apertus: Qwen 3's layout, with another activation.
    Family("apertus", names=TensorNames(attention_norm="attention_layernorm"), head_norms=SHARED_NORMS),
    # Arcee (AFM): Llama's layout, with another activation.
    Family("arcee"),
    # Command R and Aya: optionally a norm for each head of queries and keys, all in one matrix.
    Family(
        "cohere",
        head_norms=HeadNorms("q_norm", "k_norm", "matrix", kind="layer", switch="use_qk_norm"),
        positions=INTERLEAVED,
    ),
    # Command R7B, Command A and newer Aya: Llama's layout. Layers without a sliding window are not rotated.
    Family(
        "cohere2",
        default_sizes={
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_hidden_layers": 40,
            "intermediate_size": 22528,
            "vocab_size": 256000,
        },
        positions=PositionEncoding(rotary_pairing="interleaved", rotates_only="sliding_attention"),
    ),
    # Code World Model: Llama 3's layout, with sliding windows.
    Family("cwm", default_n_kv_heads=8, null_n_kv_heads="refused", default_head_dim=128),
    # dots.llm1: Qwen 3's layout, with experts, which are copied.
    Family("dots1", default_n_kv_heads=32, head_norms=SHARED_NORMS, joins_experts=True),
    # ERNIE 4.5, the dense ones: Llama's layout.
    Family("ernie4_5", default_n_kv_heads=2, default_head_dim=128, positions=INTERLEAVED),
    # EXAONE 4: Qwen 3's layout. With sliding windows, layers without a window are not rotated.
    Family(
        "exaone4",
        default_n_kv_heads=32,
        null_n_kv_heads="refused",
        names=NO_ATTENTION_NORM,
        head_norms=SHARED_NORMS,
        positions=PositionEncoding(rotates_only="sliding_attention", null_window_rotates=True),
    ),
    # FlexOlmo: as OLMo 2, with experts, which are copied.
    Family("flex_olmo", names=NO_ATTENTION_NORM, head_norms=FLAT_NORMS, joins_experts=True),
    # Gemma and CodeGemma: Llama's layout with a head size of its own.
    Family(
        "gemma",
        default_n_kv_heads=16,
        null_n_kv_heads="refused",
        default_head_dim=256,
        default_sizes={"hidden_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28},
    ),
    # Gemma 2: as Gemma; windows and caps on logits have no weights.
    Family(
        "gemma2",
        default_n_kv_heads=4,
        null_n_kv_heads="refused",
        default_head_dim=256,
        default_sizes={"hidden_size": 2304, "num_attention_heads": 8, "num_hidden_layers": 26},
    ),
    # Gemma 3 1B, and the language model of the larger ones: Gemma's layout, and norms that all heads share.
    Family(
        "gemma3_text",
        default_n_kv_heads=4,
        null_n_kv_heads="refused",
        default_head_dim=256,
        head_norms=HeadNorms("q_norm", "k_norm", "shared", offset=1.0),
        rope_by_layer_type=True,
        default_sizes={
            "hidden_size": 2304,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "intermediate_size": 9216,
            "vocab_size": 262208,
        },
    ),
    # GLM-4 9B and GLM-Edge in transformers' own format, and GLM-4-0414: Llama's layout with q, k and v biases.
    *(
        Family(
            model_type,
            default_n_kv_heads=2,
            null_n_kv_heads="refused",
            default_head_dim=128,
            positions=PositionEncoding(rotary_fraction=0.5, partial_rotary=True, rotary_pairing="interleaved"),
        )
        for model_type in ("glm", "glm4")
    ),
    # gpt-oss: Llama's layout with biases, and a sink for each query head, which is copied.
    Family(
        "gpt_oss",
        default_n_kv_heads=8,
        null_n_kv_heads="refused",
        default_head_dim=64,
        names=TensorNames(not_per_head=("sinks",)),
    ),
    # Granite: Llama's layout; its multipliers are in the config.
    Family("granite"),
    # Granite 3 with experts, and PowerMoE: Llama's layout; the experts are copied.
    Family("granitemoe", joins_experts=True),
    # Granite with shared experts: as Granite with experts.
    Family("granitemoeshared", joins_experts=True),
    # Helium: Llama's layout.
    Family(
        "helium",
        default_n_kv_heads=20,
        null_n_kv_heads="refused",
        default_head_dim=128,
        positions=INTERLEAVED,
    ),
    # Hunyuan, the dense ones: Llama's layout, and RMS norms that all heads share.
    Family("hunyuan_v1_dense", head_norms=HeadNorms("query_layernorm", "key_layernorm", "shared", after_rotation=True)),
    # Hunyuan with experts, which are copied (Hunyuan-A13B): as the dense ones.
    Family(
        "hunyuan_v1_moe",
        head_norms=HeadNorms("query_layernorm", "key_layernorm", "shared", after_rotation=True),
        joins_experts=True,
    ),
    # HyperCLOVA X SEED Think: Granite's layout, optionally with norms behind attention and MLP.
    Family("hyperclovax"),
    # Jais 2: Llama's layout with biases everywhere.
    Family("jais2"),
    # Llama 1 to 3, Vicuna, CodeLlama, OpenLLaMA, SmolLM, and everything else that says `"model_type": "llama"`.
    Family(
        "llama",
        default_sizes={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "max_position_embeddings": 2048,
            "intermediate_size": 11008,
            "vocab_size": 32000,
        },
    ),
    # Ministral 8B: Mistral's layout, with a kind of window for each layer.
    Family("ministral", default_n_kv_heads=8, null_n_kv_heads="refused"),
    # Ministral 3, its language model: Mistral's layout.
    Family(
        "ministral3",
        default_n_kv_heads=8,
        null_n_kv_heads="refused",
        default_head_dim=128,
        default_sizes={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 34,
            "intermediate_size": 14336,
            "vocab_size": 131072,
        },
    ),
    # Mistral 7B and its relatives: Llama's layout.
    Family(
        "mistral",
        default_n_kv_heads=8,
        null_n_kv_heads="refused",
        default_sizes={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "max_position_embeddings": 131072,
            "intermediate_size": 14336,
            "vocab_size": 32000,
        },
        ignores_tokenizer_class=True,
    ),
    # Mixtral: Mistral's attention; the experts are copied.
    Family("mixtral", default_n_kv_heads=8, null_n_kv_heads="refused", joins_experts=True),
    # nanochat: Llama's layout; its norms have no weights.
    Family(
        "nanochat",
        names=NO_ATTENTION_NORM,
        head_norms=HeadNorms("q_norm", "k_norm", "none", after_rotation=True),
        positions=PositionEncoding(rotates_back=True),
    ),
    # Nemotron 3 and 4, Minitron: Llama's layout; the class raises an error if the number of K/V heads is missing.
    Family(
        "nemotron",
        default_n_kv_heads="refused",
        null_n_kv_heads="refused",
        positions=PositionEncoding(rotary_fraction=0.5, partial_rotary=True),
    ),
    # OLMo: Llama's layout, norms without weights; `clip_qkv` clips merged heads too.
    Family("olmo", names=NO_ATTENTION_NORM, engines_without_gqa=("vLLM", "SGLang")),
    # OLMo 2: queries and keys are normalised over all heads together.
    Family("olmo2", names=NO_ATTENTION_NORM, head_norms=FLAT_NORMS),
    # OLMo 3: as OLMo 2, with sliding windows.
    Family("olmo3", names=NO_ATTENTION_NORM, head_norms=FLAT_NORMS, rope_by_layer_type=True),
    # OLMoE: as OLMo 2, with experts, which are copied.
    Family("olmoe", head_norms=FLAT_NORMS, joins_experts=True, engines_without_gqa=("llama.cpp", "SGLang")),
    # Phi 1 to 2: biases everywhere, an output projection called `dense`, and optional norms that all heads share.
    Family(
        "phi",
        names=TensorNames(final_norm="final_layernorm", output="dense"),
        head_norms=HeadNorms("q_layernorm", "k_layernorm", "shared", kind="layer", switch="qk_layernorm"),
        positions=PositionEncoding(rotary_fraction=0.5, partial_rotary=True),
        engines_without_gqa=("vLLM", "llama.cpp", "SGLang"),
    ),
    # Phi 3: queries, keys and values in one projection.
    Family(
        "phi3",
        names=TensorNames(fused="qkv_proj"),
        positions=PositionEncoding(partial_rotary=True),
        rope_scaling_v4=("type", "short_factor", "long_factor"),
        refused={
            "rope_scaling.type": (
                "su",
                "transformers 5 cannot open it; set it to longrope, the same scaling under its later name.",
            )
        },
    ),
    # Phi 3.5 MoE: Mixtral's layout; the experts are copied.
    Family("phimoe", default_n_kv_heads=8, null_n_kv_heads="refused", joins_experts=True),
    # Qwen 1.5 and 2: Llama's layout with q, k and v biases.
    Family(
        "qwen2",
        default_n_kv_heads=32,
        default_sizes={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "max_position_embeddings": 32768,
            "intermediate_size": 22016,
            "vocab_size": 151936,
        },
    ),
    # Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2's attention; the experts are copied.
    Family("qwen2_moe", default_n_kv_heads=16, null_n_kv_heads="refused", joins_experts=True),
    # Qwen 3: one norm for the queries and one for the keys, each shared by all heads.
    Family(
        "qwen3",
        default_n_kv_heads=32,
        default_head_dim=128,
        head_norms=SHARED_NORMS,
        default_sizes={
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "intermediate_size": 22016,
            "vocab_size": 151936,
        },
    ),
    # Qwen 3 with experts, which are copied: as Qwen 3.
    Family("qwen3_moe", default_n_kv_heads=4, null_n_kv_heads="refused", head_norms=SHARED_NORMS, joins_experts=True),
    # Seed-OSS: Llama's layout with q, k and v biases.
    Family("seed_oss", default_n_kv_heads=8, default_head_dim=128),
    # SmolLM3: Llama's layout; some layers have no rotary embedding.
    Family("smollm3", default_n_kv_heads=4, positions=PositionEncoding(no_rope_every=4)),
    # Solar Open: Llama's layout, with experts, which are copied.
    Family("solar_open", default_n_kv_heads=8, null_n_kv_heads="refused", default_head_dim=128, joins_experts=True),
    # StableLM 3B and 2: optional biases, and optionally a norm for each head of queries and keys.
    Family(
        "stablelm",
        default_n_kv_heads=32,
        null_n_kv_heads="refused",
        head_norms=HeadNorms("q_layernorm", "k_layernorm", "list", kind="layer", switch="qk_layernorm"),
        positions=PositionEncoding(rotary_fraction=0.25, partial_rotary=True),
    ),
    # StarCoder 2: Llama's layout with biases everywhere.
    Family("starcoder2", default_n_kv_heads=2, null_n_kv_heads="refused"),
)
