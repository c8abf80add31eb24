"""Define Falcon-RW 1B and 7B, which are multi-head. Their class supports one other layout: multi-query.

Falcon 7B is multi-query already. 40B and 180B are grouped already, in a class with other norms.
"""

from model.families.family import ConfigKeys, Family, PositionEncoding, Switch, TensorNames

FAMILY = Family(
    "falcon",
    keys=ConfigKeys(n_kv_heads="num_kv_heads"),
    default_sizes={"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32},
    names=TensorNames(
        prefix=r"(?:transformer\.)?",
        layers="h",
        embedding="word_embeddings",
        final_norm="ln_f",
        attention=("self_attention",),
        output="dense",
        fused="query_key_value",
    ),
    fused_by="group",
    switch=Switch("multi_query", default=True, values={True: 1, False: "n_heads"}, merged=True),
    only_multi_query=True,
    positions=PositionEncoding(alibi="alibi"),
    refused={
        "new_decoder_architecture": (
            True,
            "that is Falcon 2, falcon-40b or 180b, which is grouped already; use it as it is.",
        )
    },
)
