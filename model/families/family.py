"""What a model family says about where attention lies in its checkpoints. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Assumed = Literal["n_heads", "refused"]
"""What a config class makes of a missing number of K/V heads: as many as query heads, or an error."""


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the queries and keys whose weights differ from head to head. Those of the keys are merged with them.

    `flat`: one weight of n_heads * head_dim. `matrix`: one of (n_heads, head_dim). `list`: one of head_dim for each
    head, `NAME.norms.{head}.weight`. (With n_kv_heads for the keys.)
    """

    query: str
    key: str
    layout: Literal["flat", "matrix", "list"]


@dataclass(frozen=True)
class Family:
    """One `model_type`: the names of its attention tensors and the defaults of its Hugging Face config class.

    Heads lie one after another in the rows of the query, key and value projections and in the columns of the output
    projection; head h of the queries reads K/V head h // heads_per_group. Biases are known wherever they occur.

    The defaults are those of transformers 5.23, and tests compare them with the classes installed.
    """

    model_type: str
    absent_n_kv_heads: int | Assumed
    """What the class assumes where `num_key_value_heads` is absent."""
    null_n_kv_heads: Assumed = "n_heads"
    """The same where it is null."""
    absent_head_dim: int | None = None
    """What it assumes where `head_dim` is absent; None means hidden_size / num_attention_heads."""
    absent_sizes: Mapping[str, int] = field(default_factory=dict)
    """What it assumes for other sizes. Configs nested in others (LLaVA's) often leave them out."""
    prefix: str = r"(?:model\.)?"
    """Pattern of what stands before `layers.0.self_attn.` in tensor names; nothing where a base model was saved."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str | None = None
    """One projection with the rows of queries, keys and values, in this order, instead of three."""
    head_norms: HeadNorms | None = None
    not_per_head: tuple[str, ...] = ()
    """Further parts, which do not depend on the number of heads and are copied."""


@dataclass(frozen=True)
class Wrapper:
    """A `model_type` around a language model of one of the families: only that model's heads are merged."""

    model_type: str
    text_config: str
    """The key of `config.json` under which the language model's own config stands."""
    absent_text_type: str
    """The language model's `model_type` where its config does not say."""
    prefix: str
    """As in `Family`, for the language model inside."""
    others: str
    """Pattern of the beginning of other parts' tensor names, which may have attention of their own and are copied."""
