"""What a model family says about where attention lies in its checkpoints. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
class ConfigKeys:
    """Where `config.json` has the sizes of attention. A dot leads into a nested object.

    Of several names for one size, the first that is present and not null counts.
    """

    n_layers: tuple[str, ...] = ("num_hidden_layers",)
    n_heads: tuple[str, ...] = ("num_attention_heads",)
    hidden_size: str = "hidden_size"
    head_dim: str = "head_dim"
    n_kv_heads: str = "num_key_value_heads"
    rope_theta: str = "rope_theta"
    """As transformers 4 has it; version 5 has `rope_parameters` in every family. So for the next."""
    partial_rotary_factor: str = "partial_rotary_factor"


@dataclass(frozen=True)
class Switch:
    """A setting beside the number of K/V heads that decides how many the class makes."""

    key: str
    """As in `ConfigKeys`."""
    absent: Any
    """What the class assumes where it is absent."""
    values: Mapping[Any, int | Assumed | None]
    """For each value it can have, the number of K/V heads; None where the config's number counts."""
    merged: Any
    """The value that a model with merged heads needs."""


@dataclass(frozen=True)
class CustomCode:
    """Code in `model/remote_code`, with which transformers opens what a family's stock class cannot hold.

    It travels in the output folder, and `auto_map` in `config.json` names it.
    """

    model_type: str
    architectures: Mapping[str, str]
    """For each stock class that can be replaced, ours."""
    auto_map: Mapping[str, str]
    """For each of transformers' auto classes, what it opens."""

    @property
    def files(self) -> tuple[Path, Path]:
        """The config's file and the model's."""
        folder = Path(__file__).parents[1] / "remote_code"
        return folder / f"configuration_{self.model_type}.py", folder / f"modeling_{self.model_type}.py"


@dataclass(frozen=True)
class Family:
    """One `model_type`: the names of its attention tensors and the defaults of its Hugging Face config class.

    Heads lie one after another in the rows of the query, key and value projections and in the columns of the output
    projection; head h of the queries reads K/V head h // heads_per_group. Biases are known wherever they occur.

    The defaults are those of transformers 5.23, and tests compare them with the classes installed.
    """

    model_type: str
    default_n_kv_heads: int | Assumed = "n_heads"
    """What the class assumes where `num_key_value_heads` is absent."""
    null_n_kv_heads: Assumed = "n_heads"
    """The same where it is null."""
    default_head_dim: int | None = None
    """What it assumes where `head_dim` is absent; None means hidden_size / num_attention_heads."""
    default_sizes: Mapping[str, int] = field(default_factory=dict)
    """What it assumes for other sizes. Configs nested in others (LLaVA's) often leave them out."""
    keys: ConfigKeys = ConfigKeys()
    prefix: str = r"(?:model\.)?"
    """Pattern of what stands before `layers.0.self_attn.` in tensor names; nothing where a base model was saved."""
    layers: str = "layers"
    attention: tuple[str, ...] = ("self_attn",)
    """What stands between a layer's number and the names below, for each attention that a layer has."""
    other_towers: str | None = None
    """Pattern of the beginning of other parts' tensor names, which may have attention of their own and are copied."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str | None = None
    """One projection with the rows of queries, keys and values instead of three."""
    fused_by: Literal["kind", "group"] = "kind"
    """Whether its rows are all queries, all keys, all values; or, group by group, the queries of a group, its key and
    its value. (Where each query head has a K/V head, the latter is query, key, value of one head after another.)"""
    head_norms: HeadNorms | None = None
    rotary_fraction: float | None = None
    """How much of a head is rotated by position, its first dimensions, i with i + half of them, where nothing else but
    optional norms is done to queries and keys: what methods must know that align heads before they merge them. Less
    than 1 is what the class assumes where the config's `partial_rotary_factor` is absent."""
    no_rope_every: int | None = None
    """Where some layers have no rotary embedding: every which, if the config has neither `no_rope_layers` (1 where a
    layer has one, 0 where not) nor `no_rope_layer_interval`."""
    not_per_head: tuple[str, ...] = ()
    """Further parts, which do not depend on the number of heads and are copied."""
    switch: Switch | None = None
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Settings with which a model cannot be converted: the value, and why."""
    only_multi_query: bool = False
    """Whether the class can hold as many K/V heads as query heads, or one, and nothing between."""
    custom_code: CustomCode | None = None
    needs_own_code: str | None = None
    """A word that the checkpoint's own code must contain for it to heed the number of K/V heads, where the stock class
    does not."""

    @property
    def stock_class_supports_gqa(self) -> bool:
        """Whether the stock class takes any number of K/V heads, from one key of the config alone."""
        return self.switch is None and self.custom_code is None


@dataclass(frozen=True)
class Wrapper:
    """A `model_type` around a language model of one of the families: only that model's heads are merged."""

    model_type: str
    text_config: str
    """The key of `config.json` under which the language model's own config stands."""
    default_text_type: str
    """The language model's `model_type` where its config does not say."""
    prefix: str
    """As in `Family`, for the language model inside."""
    other_towers: str
    """Pattern of the beginning of other parts' tensor names, which may have attention of their own and are copied."""
