"""Edit the source's `config.json` for another number of K/V heads."""

import json
from typing import Any

from convert.planning.remote_code import Code
from model.checkpoint import Checkpoint
from model.common.typed_json import json_bytes
from model.decoder.rope_settings import refuse_two_values
from model.families import Family
from model.families.family import set_key
from model.geometry import Geometry


def merged_config(
    checkpoint: Checkpoint, geometry: Geometry, n_kv_heads: int, regrouped: bool, code: Code | None
) -> bytes:
    """Return `config.json` with the new number of K/V heads. Every other key keeps its spelling and order.

    If heads were regrouped, add the keys that version 4 of transformers reads beside those of version 5. If the stock
    class cannot hold the heads, name the code that can.
    """
    family, text_config = geometry.family, geometry.text_config
    config = json.loads(checkpoint.config_bytes)
    inner = config if text_config is None else config[text_config]
    if regrouped or family.stock_class_supports_gqa:
        set_key(inner, family.keys.n_kv_heads, n_kv_heads)
    if regrouped and family.switch is not None:
        set_key(inner, family.switch.key, family.switch.merged)
    if code is not None:
        config |= code.settings
    if regrouped:
        _add_old_spelling(inner, family)
    return checkpoint.config_bytes if config == json.loads(checkpoint.config_bytes) else json_bytes(config)


def _add_old_spelling(config: dict[str, Any], family: Family) -> None:
    """Add the RoPE keys of transformers 4, which ignores `rope_parameters` and would use its defaults.

    Nothing is added if the layers' RoPE differs, or if the class knows no other: each class of version 4 has its own
    keys for that. Nor for settings that the class has no key for in version 4, since version 5 reads `rope_scaling` in
    their place. Nor beside a `rope_scaling` of the source, with which version 5 takes the class's own base, not that of
    `rope_parameters`. Raises CheckpointError if `rope_scaling` would be added to a source that has another value under
    such a key: beside `rope_scaling`, version 5 reads that one, too.
    """
    if config.get("rope_scaling") is not None or family.rope_by_layer_type:
        return
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or any(isinstance(v, dict) for v in rope.values()):
        return
    added = {family.keys.rope_theta: rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        added[family.keys.partial_rotary_factor] = rope["partial_rotary_factor"]
    if family.rope_keys_without_place(rope):
        return
    if rope.get("rope_type", "default") != "default":
        for key, key_inside in (
            (family.keys.rope_theta, "rope_theta"),
            (family.keys.partial_rotary_factor, "partial_rotary_factor"),
        ):
            refuse_two_values(config, key, "rope_parameters", rope, key_inside)
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        if family.rope_scaling_v4 is not None:
            named = {**rope, "type": rope["rope_type"]}
            scaling = {k: named[k] for k in family.rope_scaling_v4 if k in named}
        added["rope_scaling"] = scaling
    config |= {key: value for key, value in added.items() if config.get(key) is None}
