"""Define MPT, whose checkpoints contain the code of llm-foundry (`attn_config.kv_n_heads`)."""

from model.families.family import ConfigKeys, Family, HeadNorms, PositionEncoding, Switch, TensorNames

FAMILY = Family(
    "mpt",
    keys=ConfigKeys(
        n_layers=("n_layers",),
        n_heads=("n_heads",),
        hidden_size="d_model",
        n_kv_heads="attn_config.kv_n_heads",
    ),
    default_sizes={"d_model": 2048, "n_heads": 16, "n_layers": 24},
    names=TensorNames(
        prefix=r"(?:transformer\.)?",
        layers="blocks",
        embedding="wte",
        final_norm="norm_f",
        attention=("attn",),
        attention_norm="norm_1",
        output="out_proj",
        fused="Wqkv",
    ),
    head_norms=HeadNorms("q_ln", "k_ln", "flat", kind="layer", switch="attn_config.qk_ln"),
    switch=Switch(
        "attn_config.attn_type",
        default="multihead_attention",
        values={"multihead_attention": "n_heads", "multiquery_attention": 1, "grouped_query_attention": None},
        merged="grouped_query_attention",
    ),
    own_code_key="kv_n_heads",
    positions=PositionEncoding(rotary_fraction=None, alibi="attn_config.alibi", alibi_table_length="max_seq_len"),
    class_ignores={
        "attn_config.alibi": (None, True),
        "attn_config.rope": (None, False),
        "attn_config.alibi_bias_max": (None, 8),
        "attn_config.prefix_lm": (None, False),
        "attn_config.sliding_window_size": (None, -1),
        "attn_config.attn_logit_softcapping": (None,),
        "attn_config.qk_gn": (None, False),
        "norm_type": (None, "low_precision_layernorm", "layernorm"),
        "norm_eps": (None, 1e-5),
        "block_overrides": (None,),
    },
    lm_head_ignores={"logit_scale": (None,), "final_logit_softcapping": (None,)},
)
