"""Define GPT-NeoX: Pythia, GPT-NeoX-20B, Dolly, RedPajama. Fewer K/V heads need custom code, copied to the output."""

from dataclasses import replace

from model.families.family import ConfigKeys, CustomCode, Family, PositionEncoding, TensorNames

CODE = CustomCode(
    "gpt_neox_gqa",
    architectures={
        "GPTNeoXForCausalLM": "GPTNeoXGQAForCausalLM",
        "GPTNeoXModel": "GPTNeoXGQAModel",
        "GPTNeoXGQAForCausalLM": "GPTNeoXGQAForCausalLM",
        "GPTNeoXGQAModel": "GPTNeoXGQAModel",
    },
    auto_map={
        "AutoConfig": "GPTNeoXGQAConfig",
        "AutoModel": "GPTNeoXGQAModel",
        "AutoModelForCausalLM": "GPTNeoXGQAForCausalLM",
    },
)
SIZES = {"hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44}
FAMILY = Family(
    "gpt_neox",
    keys=ConfigKeys(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"),
    default_sizes=SIZES,
    names=TensorNames(
        prefix=r"(?:gpt_neox\.)?",
        embedding="embed_in",
        final_norm="final_layer_norm",
        lm_head="embed_out",
        attention=("attention",),
        output="dense",
        fused="query_key_value",
        not_per_head=("bias", "masked_bias"),  # the causal mask, in old checkpoints
    ),
    fused_by="group",
    custom_code=CODE,
    positions=PositionEncoding(rotary_fraction=0.25, partial_rotary=True),
)
GQA_FAMILY = replace(FAMILY, model_type="gpt_neox_gqa")
"""The family with grouped heads, as `convert` writes it."""
