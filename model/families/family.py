"""What a model family says about where attention lies in its checkpoints. Data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One `model_type`: the names of its attention tensors and the defaults of its Hugging Face config class.

    Heads lie one after another in the rows of the query, key and value projections and in the columns of the output
    projection; head h of the queries reads K/V head h // heads_per_group.
    """

    model_type: str
    absent_n_kv_heads: int | None
    """What the class assumes where `num_key_value_heads` is absent; None means as many as query heads.

    (A `null` means as many as query heads in every class.)"""
    attention: str = r"(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})\.self_attn\.(?P<part>.+)"
    """Pattern of the names of all attention tensors; `part` is the rest of the name."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    not_per_head: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Parts that do not depend on the number of heads and are copied."""
