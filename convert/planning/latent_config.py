"""Make the `config.json` of latent attention, and its tokenizer's."""

from typing import Any

from convert.latent.sizes import LatentSizes
from convert.latent.stock_tensors import rounded_weight
from model.checkpoint import Checkpoint
from model.checkpoint.hf_config import rope_entries
from model.checkpoint.latent_norm import LATENT_NORM_EPSILON, LATENT_NORM_KEY
from model.checkpoint.tensor import TORCH_DTYPES
from model.common.errors import CheckpointError, InputError
from model.common.typed_json import json_bytes, parse_object
from model.decoder.config import LlamaConfig
from model.families import Family
from model.files.read import MAX_CONFIG_BYTES, read_content
from model.geometry import Geometry

MODEL_TYPE = "deepseek_v3"
TOKENIZER_CONFIG = "tokenizer_config.json"


def latent_config(
    checkpoint: Checkpoint, geometry: Geometry, source: LlamaConfig, sizes: LatentSizes, rope: dict[str, Any] | None,
    dtype: str,
) -> bytes:  # fmt: skip
    """Return `config.json`. Latent attention has another class than the source, so all keys are its own.

    `rope`: `rope_parameters`; None before the frequencies are chosen. `dtype`: that of the layers' tensors.
    """
    return json_bytes(
        _model_settings(geometry, source, sizes)
        | {LATENT_NORM_KEY: {"kind": sizes.norm, "weight": rounded_weight(sizes)}}
        | ({"rope_parameters": None} if rope is None else _rope_settings(rope))
        | _kept_settings(checkpoint.config, geometry.family, dtype)
    )


def _model_settings(geometry: Geometry, source: LlamaConfig, sizes: LatentSizes) -> dict[str, Any]:
    """Return `config.json` of transformers' DeepSeek-V3 with dense layers only, but for its rotary embedding."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": MODEL_TYPE,
        "vocab_size": source.vocab_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": geometry.n_layers,
        "num_attention_heads": geometry.n_heads,
        "num_key_value_heads": geometry.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": source.rope.max_positions,
        "rms_norm_eps": LATENT_NORM_EPSILON,
        "tie_word_embeddings": False,
        "attention_bias": sizes.norm == "bias",
        "attention_dropout": 0.0,
        "kv_lora_rank": sizes.kv_lora_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "v_head_dim": sizes.head_dim,
        "rope_interleave": True,
        # All layers are dense. Engines read the numbers of experts nevertheless.
        "first_k_dense_replace": geometry.n_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": source.intermediate_size,
        "num_nextn_predict_layers": 0,
    }


def _rope_settings(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding in the spellings of transformers 4 and 5."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return rope_entries(rope["rope_theta"], None if rope["rope_type"] == "default" else scaling)


def _kept_settings(config: dict[str, Any], family: Family, tensors_dtype: str) -> dict[str, Any]:
    """Return the settings of `config.json` that the output keeps, with the dtype of the layers' tensors.

    DeepSeek-V3's class has other defaults of the special tokens than Llama's and Mistral's, so these are written out.
    The dtype is that of the layers, whatever the source's config says: programs load a model in it, and in float16 the
    latent's norm would overflow.
    """
    defaults = {"bos_token_id": 1, "eos_token_id": 2}
    kept = config | dict.fromkeys(("dtype", "torch_dtype"), TORCH_DTYPES[tensors_dtype])
    keys = ["bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "initializer_range", "use_cache"]
    if not family.ignores_tokenizer_class:  # transformers would not ignore it for the output's type
        keys.append("tokenizer_class")
    return defaults | {key: kept[key] for key in keys if key in config}


def tokenizer_config(checkpoint: Checkpoint, family: Family) -> dict[str, bytes]:
    """Return the tokenizer's config with the class that transformers gives the source's tokenizer, if it names another.

    For some families (`ignores_tokenizer_class`), transformers uses `tokenizer.json` or `tokenizer.model` as it is. For
    the `model_type` of latent attention it uses the class that the config names, which may split texts in another way.
    """
    content = checkpoint.side_files.get(TOKENIZER_CONFIG)
    taken_as_it_is = {"tokenizer.json", "tokenizer.model"} & checkpoint.side_files.keys()
    if not family.ignores_tokenizer_class or content is None or not taken_as_it_is:
        return {}
    text = read_content(content, MAX_CONFIG_BYTES)
    try:
        config = parse_object(text)
        if config.get("tokenizer_class") is None:
            return {}
        return {TOKENIZER_CONFIG: json_bytes(config | {"tokenizer_class": "PreTrainedTokenizerFast"})}
    except (InputError, UnicodeEncodeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.path}/{TOKENIZER_CONFIG} is damaged: {error}.") from error
