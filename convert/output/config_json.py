"""Make the files beside the weights: the edited `config.json`, and the files copied from the source."""

import json
from pathlib import Path
from typing import Any

from convert.planning.latent_plan import LatentPlan
from convert.planning.notes import rope_keys_without_place
from convert.planning.plan import Plan
from model.checkpoint import Checkpoint
from model.checkpoint.hf_folder import json_text
from model.common.errors import CheckpointError
from model.common.file_names import UPTRAINING_RECORD
from model.common.read_files import CONFIG_BYTES, read_content
from model.families import Family
from model.geometry import set_key

TOKENIZER_CONFIG = "tokenizer_config.json"


def config_text(checkpoint: Checkpoint, plan: Plan) -> bytes:
    """Return `config.json` with the new number of K/V heads. Every other key keeps its spelling and order.

    If heads were regrouped, add the keys that version 4 of transformers reads beside those of version 5. If the stock
    class cannot hold the heads, name the code that can. Latent attention has another class, so all keys are its own.
    """
    if isinstance(plan, LatentPlan):
        return json_text(plan.config)
    family, text_config = plan.geometry.attention.family, plan.geometry.text_config
    config = json.loads(checkpoint.config_text)
    inner = config if text_config is None else config[text_config]
    if plan.computed or family.stock_class_supports_gqa:
        set_key(inner, family.keys.n_kv_heads, plan.n_kv_heads)
    if plan.computed and family.switch is not None:
        set_key(inner, family.switch.key, family.switch.merged)
    if plan.code is not None:
        config |= plan.code.settings
    if plan.computed:
        _add_old_spelling(inner, family)
    return checkpoint.config_text if config == json.loads(checkpoint.config_text) else json_text(config)


def _add_old_spelling(config: dict[str, Any], family: Family) -> None:
    """Add the RoPE keys of transformers 4, which ignores `rope_parameters` and would use its defaults.

    Nothing is added if the layers' RoPE differs: each class of version 4 has its own keys for that. Nor for settings
    that the class has no key for in version 4, since version 5 reads `rope_scaling` in their place.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or any(isinstance(v, dict) for v in rope.values()):
        return
    added = {family.keys.rope_theta: rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        added[family.keys.partial_rotary_factor] = rope["partial_rotary_factor"]
    if rope_keys_without_place(rope, family):
        return
    if rope.get("rope_type", "default") != "default":
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        if family.rope_scaling_v4 is not None:
            named = {**rope, "type": rope["rope_type"]}
            scaling = {k: named[k] for k in family.rope_scaling_v4 if k in named}
            if "original_max_position_embeddings" in rope:
                added["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        added["rope_scaling"] = scaling
    config |= {key: value for key, value in added.items() if config.get(key) is None}


def copied_files(checkpoint: Checkpoint, plan: Plan) -> dict[str, Path | bytes]:
    """Return the copied files by relative name: the source's, and the model code that the output needs.

    The record of an uptraining is left out where heads change: it is about other weights.
    """
    files = dict(checkpoint.side_files)
    if plan.computed:
        files.pop(UPTRAINING_RECORD, None)
    if isinstance(plan, LatentPlan):
        files |= _tokenizer_config(checkpoint, plan.geometry.attention.family)
    return {**files, **(plan.code.files if plan.code is not None else {})}


def _tokenizer_config(checkpoint: Checkpoint, family: Family) -> dict[str, bytes]:
    """Return the tokenizer's config with the class that transformers gives the source's tokenizer, if it names another.

    For some families (`ignores_tokenizer_class`), transformers uses `tokenizer.json` or `tokenizer.model` as it is. For
    the `model_type` of latent attention it uses the class that the config names, which may split texts in another way.
    """
    content = checkpoint.side_files.get(TOKENIZER_CONFIG)
    taken_as_it_is = {"tokenizer.json", "tokenizer.model"} & checkpoint.side_files.keys()
    if not family.ignores_tokenizer_class or content is None or not taken_as_it_is:
        return {}
    text = read_content(content, CONFIG_BYTES)
    try:
        config = json.loads(text)
        if config.get("tokenizer_class") is None:
            return {}
        return {TOKENIZER_CONFIG: json_text(config | {"tokenizer_class": "PreTrainedTokenizerFast"})}
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.path}/{TOKENIZER_CONFIG} is damaged: {error}.") from error
