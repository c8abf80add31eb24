"""Define T5 1.0 and 1.1, FLAN-T5 and mT5. Their decoders' self- and cross-attention heads are merged.

The encoder keeps its heads: it computes all its tokens at once, so memory bandwidth does not limit it (Ainslie et al.
2023, section 2.2). Fewer K/V heads need custom code, which is copied to the output.
"""

from dataclasses import replace

from model.families.family import ConfigKeys, CustomCode, Family, PositionEncoding, TensorNames

CODE = CustomCode(
    "t5_gqa",
    architectures={
        "T5ForConditionalGeneration": "T5GQAForConditionalGeneration",
        "T5WithLMHeadModel": "T5GQAForConditionalGeneration",  # its name until 2020
        "T5Model": "T5GQAModel",
        "T5GQAForConditionalGeneration": "T5GQAForConditionalGeneration",
        "T5GQAModel": "T5GQAModel",
    },
    auto_map={
        "AutoConfig": "T5GQAConfig",
        "AutoModel": "T5GQAModel",
        "AutoModelForSeq2SeqLM": "T5GQAForConditionalGeneration",
    },
)
FAMILY = Family(
    "t5",
    keys=ConfigKeys(
        n_layers=("num_decoder_layers", "num_layers"), n_heads=("num_heads",), hidden_size="d_model", head_dim="d_kv"
    ),
    default_head_dim=64,
    default_sizes={"d_model": 512, "num_heads": 8, "num_layers": 6},
    names=TensorNames(
        prefix=r"decoder\.",
        layers="block",
        embedding=None,
        final_norm="final_layer_norm",
        attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
        other_towers=r"encoder\.",
        elsewhere=(
            ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
            ("encoder.final_layer_norm.weight",),
        ),
        query="q",
        key="k",
        value="v",
        output="o",
        not_per_head=("relative_attention_bias.weight",),  # one number for each query head
    ),
    custom_code=CODE,
    positions=PositionEncoding(rotary_fraction=0.0),
)
GQA_FAMILY = replace(FAMILY, model_type="t5_gqa")
"""The family with grouped heads, as `convert` writes it."""
MT5_FAMILY = replace(
    FAMILY,
    model_type="mt5",
    default_sizes={"d_model": 512, "num_heads": 6, "num_layers": 8},
    custom_code=replace(
        CODE,
        architectures={"MT5ForConditionalGeneration": "T5GQAForConditionalGeneration", "MT5Model": "T5GQAModel"},
        # mT5's class never scales the logits. T5's does so if tie_word_embeddings is true, which transformers 5 writes
        # for both, with or without a head of its own.
        settings={"scale_decoder_outputs": False},
        defaults={
            "vocab_size": 250112, "d_ff": 1024, "num_heads": 6, "num_layers": 8, "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
    ),
)  # fmt: skip
"""mT5 computes as T5 1.1 does. Its output is a `t5_gqa`."""
