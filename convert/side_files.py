"""What lies beside the weights in the output: `config.json`, edited in place, and the files that travel along."""

import json
from pathlib import Path

from convert.plan import Plan
from model.checkpoint import Checkpoint
from model.checkpoint.folder import json_text
from model.config import set_key


def config_text(checkpoint: Checkpoint, plan: Plan) -> bytes:
    """Return `config.json` with the new number of K/V heads; every other key, its spelling and its order are kept.

    Where heads were regrouped and the stock class cannot hold that, it also names the code that can.
    """
    family, text_config = plan.geometry.attention.family, plan.geometry.text_config
    config = json.loads(checkpoint.config_text)
    inner = config if text_config is None else config[text_config]
    if plan.regrouped or family.stock_class_holds_few:
        set_key(inner, family.keys.n_kv_heads, plan.n_kv_heads)
    if plan.regrouped and family.switch is not None:
        set_key(inner, family.switch.key, family.switch.merged)
    if plan.code is not None:
        config |= plan.code.settings
    return checkpoint.config_text if config == json.loads(checkpoint.config_text) else json_text(config)


def copied(checkpoint: Checkpoint, plan: Plan) -> dict[str, Path | bytes]:
    """Return the other files: the source's, and the code that the output needs. Relative name to file or content."""
    return {**checkpoint.side_files, **(plan.code.files if plan.code is not None else {})}
