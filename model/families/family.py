"""Define the records that describe a model family: the names and layout of its attention, and its defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from model.checkpoint.tensor import ROPE_BUFFERS

Assumed = Literal["n_heads", "refused"]
"""A config class's default for the number of K/V heads: the number of query heads, or an error."""


@dataclass(frozen=True)
class HeadNorms:
    """The norms of queries and of keys, after their projections.

    `shared`: one weight of head_dim for all heads, each of which is normalised alone. `flat`: one weight of
    n_heads * head_dim; all heads are normalised together. `matrix`: one weight of (n_heads, head_dim). `list`: one of
    head_dim for each head, `NAME.norms.{head}.weight`. (For keys, n_kv_heads replaces n_heads.) `none`: each head is
    normalised alone, without weights.
    """

    query: str
    key: str
    layout: Literal["shared", "flat", "matrix", "list", "none"]
    kind: Literal["rms", "layer"] = "rms"
    """`layer`: the mean is subtracted."""
    after_rotation: bool = False
    """Whether queries and keys are rotated before they are normalised."""
    switch: str | None = None
    """The setting that, if true, gives the model its norms; None: it always has them."""
    offset: float = 0.0
    """Offset that the class adds to the stored weights."""

    @property
    def per_head(self) -> bool:
        """Whether each head is normalised alone."""
        return self.layout != "flat"

    @property
    def differs_by_head(self) -> bool:
        """Whether each head has weights of its own. Those of keys are merged with the keys."""
        return self.layout in ("flat", "matrix", "list")


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of `config.json` that hold the sizes of attention. A dot leads into a nested object.

    If a size has several names, the first that is present and not null is used.
    """

    n_layers: tuple[str, ...] = ("num_hidden_layers",)
    n_heads: tuple[str, ...] = ("num_attention_heads",)
    hidden_size: str = "hidden_size"
    head_dim: str = "head_dim"
    n_kv_heads: str = "num_key_value_heads"
    rope_theta: str = "rope_theta"
    """The key in transformers 4, as is the next one. Version 5 has `rope_parameters` in every family."""
    partial_rotary_factor: str = "partial_rotary_factor"


@dataclass(frozen=True)
class Switch:
    """A setting besides the number of K/V heads that changes how many the class creates."""

    key: str
    """In the spelling of `ConfigKeys`."""
    default: Any
    """The class's default for an absent key."""
    values: Mapping[Any, int | Assumed | None]
    """For each possible value, the number of K/V heads; None: the number in the config."""
    merged: Any
    """The value that a model with merged heads needs."""


@dataclass(frozen=True)
class CustomCode:
    """Code in `model/remote_code` for a family whose stock class does not support grouped heads.

    It is copied into the output folder, and `auto_map` in `config.json` names it, so that transformers loads it.
    """

    model_type: str
    architectures: Mapping[str, str]
    """Stock class → the class that replaces it."""
    auto_map: Mapping[str, str]
    """Auto class of transformers → the class that it opens."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of `config.json` that the code needs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the stock class that differ from the code's: written where `config.json` leaves them out."""

    @property
    def files(self) -> tuple[Path, Path]:
        """The paths of the configuration file and of the modeling file."""
        folder = Path(__file__).parents[1] / "remote_code"
        return folder / f"configuration_{self.model_type}.py", folder / f"modeling_{self.model_type}.py"


@dataclass(frozen=True)
class TensorNames:
    """The names of a language model's tensors; the defaults are Llama's.

    A tensor of attention is called `{prefix}{layers}.{number}.{attention}.{query}.weight`, and so on.
    """

    prefix: str = r"(?:model\.)?"
    """Pattern of the prefix before `layers.0.self_attn.` in tensor names; the saved base model has none."""
    layers: str = "layers"
    attention: tuple[str, ...] = ("self_attn",)
    """The name between a layer's number and the names below, for each attention module of a layer."""
    attention_norm: str | None = "input_layernorm"
    """The norm before a layer's attention; None if the class has none there, or one without weights."""
    embedding: str | None = "embed_tokens"
    """The name of the embedding beside the layers; None if it is elsewhere."""
    final_norm: str | None = "norm"
    """The name of the norm after the last layer, beside the layers. A class whose norms have no weights has none."""
    lm_head: str = "lm_head"
    """The name of the LM head, outside the decoder."""
    elsewhere: tuple[tuple[str, ...], ...] = ()
    """Tensors that a model needs outside its decoder. Of each tuple it needs one: formats choose between tied ones."""
    other_towers: str | None = None
    """Pattern of the prefix of other towers' tensor names. They may have attention of their own, and are copied."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str | None = None
    """The one projection that holds the rows of queries, keys and values; None if there are three projections."""
    not_per_head: tuple[str, ...] = ()
    """Further parts that do not depend on the number of heads, and are copied."""

    @property
    def headless_parts(self) -> tuple[str, ...]:
        """Parts of an attention module that do not depend on the number of heads."""
        return (*self.not_per_head, *ROPE_BUFFERS)


@dataclass(frozen=True)
class PositionEncoding:
    """How a family's attention learns of positions: by rotary embedding (RoPE), by ALiBi, or outside the heads."""

    rotary_fraction: float | None = 1.0
    """Rotary fraction of head_dim; the first dimensions of a head are rotated. 0.0: heads are used as projected.

    None if the class changes queries or keys in a way that the methods for whole layers do not know."""
    partial_rotary: bool = False
    """Whether the class reads `partial_rotary_factor`. Then `rotary_fraction` is its default."""
    rotary_pairing: Literal["half", "interleaved"] = "half"
    """The dimensions that are rotated together. `half`: i and i + half of the rotated ones; `interleaved`: 2i and
    2i + 1."""
    rotates_back: bool = False
    """Whether the class rotates by the negative of the usual angles."""
    rotates_only: str | None = None
    """The one entry of `layer_types` whose layers are rotated; None if that does not depend on `layer_types`."""
    null_window_rotates: bool = False
    """Whether all layers are rotated if `sliding_window` is null, in spite of `rotates_only`."""
    no_rope_every: int | None = None
    """Every n-th layer has no rotary embedding, if the config has neither `no_rope_layers` (per layer 1 with rotary
    embedding, 0 without) nor `no_rope_layer_interval`."""
    alibi: str | None = None
    """The setting that, if true, turns ALiBi on: instead of rotary embedding, each query head has a bias of its own by
    distance."""
    alibi_table_length: str | None = None
    """The setting with the number of positions for which the class makes a table of ALiBi's biases. A shorter text uses
    the last columns of the table."""


@dataclass(frozen=True)
class Family:
    """One `model_type`: the names of its attention tensors and the defaults of its Hugging Face config class.

    Heads are consecutive in the rows of the query, key and value projections and in the columns of the output
    projection. Query head h reads K/V head h // heads_per_group. Every projection may have a bias.

    The defaults are those of transformers 5.24; tests compare them with the installed classes.
    """

    model_type: str
    default_n_kv_heads: int | Assumed = "n_heads"
    """The class's default if `num_key_value_heads` is absent."""
    null_n_kv_heads: Assumed = "n_heads"
    """The class's default if `num_key_value_heads` is null."""
    default_head_dim: int | None = None
    """The class's default if `head_dim` is absent; None means hidden_size / num_attention_heads."""
    default_sizes: Mapping[str, int] = field(default_factory=dict)
    """The class's defaults for other sizes. Nested configs (LLaVA's) often omit them."""
    keys: ConfigKeys = ConfigKeys()
    names: TensorNames = TensorNames()
    fused_by: Literal["kind", "group"] = "kind"
    """Row order of the fused projection. `kind`: all queries, all keys, all values. `group`: group by group, the
    queries of the group, its key and its value; in an MHA model query, key and value of each head."""
    head_norms: HeadNorms | None = None
    positions: PositionEncoding = PositionEncoding()
    rope_scaling_v4: tuple[str, ...] | None = None
    """The keys of `rope_scaling` that the class reads in transformers 4, which refuses others; None if it takes all."""
    rope_by_layer_type: bool = False
    """Whether the class reads `rope_parameters` by type of layer, and no settings that all layers share."""
    ignores_tokenizer_class: bool = False
    """Whether transformers uses the tokenizer's file as it is, whatever class `tokenizer_config.json` names."""
    joins_experts: bool = False
    """Whether transformers joins the experts that the files hold one by one. `uptrain` trains attention alone then."""
    switch: Switch | None = None
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Settings that prevent a conversion: key → the value and the reason."""
    class_ignores: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that the class in transformers ignores: key → the values with which it computes the same. With others
    the class cannot calibrate."""
    lm_head_ignores: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The same of the LM head, which matters where logits are computed."""
    engines_without_gqa: tuple[str, ...] = ()
    """Engines whose own class has a K/V head for each query head, whatever the config says. (Their source, 2026.)"""
    only_multi_query: bool = False
    """Whether the class supports only MHA and MQA, and no number of K/V heads between."""
    custom_code: CustomCode | None = None
    own_code_key: str | None = None
    """The config key that the checkpoint's own code must mention, which shows that it supports GQA. For families whose
    stock class does not."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the text: its decoder's layers have cross-attention beside self-attention."""
        return len(self.names.attention) > 1

    @property
    def stock_class_supports_gqa(self) -> bool:
        """Whether the stock class supports any number of K/V heads through one key of the config."""
        return self.switch is None and self.custom_code is None

    def assumed_n_kv_heads(self, config: Mapping[str, Any], n_heads: int) -> int | None:
        """Return the number of K/V heads that the class assumes if the config gives none; None if it refuses that."""
        assumed = self.null_n_kv_heads if self.keys.n_kv_heads in config else self.default_n_kv_heads
        if assumed == "refused":
            return None
        return n_heads if assumed == "n_heads" else assumed

    def rope_keys_without_place(self, rope: Mapping[str, Any]) -> list[str]:
        """Return the keys of `rope_parameters` for which the class has none in transformers 4."""
        if self.rope_scaling_v4 is None:
            return []
        outside = ("rope_theta", "partial_rotary_factor", "rope_type", "original_max_position_embeddings")
        return sorted(rope.keys() - {*outside, *self.rope_scaling_v4})


@dataclass(frozen=True)
class Wrapper:
    """A `model_type` that contains a language model of one of the families. Only that model's heads are merged."""

    model_type: str
    default_text_type: str
    """The language model's `model_type` if its config has none."""
    text_config: str = "text_config"
    """The key of `config.json` that holds the language model's config."""
    prefix: str = r"language_model\.(?:model\.)?|model\.language_model\."
    """As in `TensorNames`, for the language model inside. Two spellings; the second since transformers 4.52."""
    other_towers: str = r"(?:model\.)?vision_tower\."
    """As in `TensorNames`."""
    text_types: Mapping[str, str] = field(default_factory=dict)
    """Its own types of language models → the family that computes the same on text."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of `text_types`' classes that differ from the family's."""
    is_causal: bool = True
    """Whether no token of a text attends to later ones."""


def get_key(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key in the spelling of `ConfigKeys`; None if it is absent."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a key in the spelling of `ConfigKeys`."""
    *outer, last = key.split(".")
    for name in outer:
        if not isinstance(config.get(name), dict):
            config[name] = {}  # absent or null; the class treats both alike
        config = config[name]
    config[last] = value
