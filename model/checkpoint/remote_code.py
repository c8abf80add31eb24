"""Code of a model's own, which `auto_map` in config.json names. It is never imported here, only told of.

The values are `module.Class` for a file beside config.json, or `org/repo--module.Class` for one in another repository
(transformers, `dynamic_module_utils.get_class_from_dynamic_module`).
"""

from collections.abc import Mapping
from typing import Any

LOADERS = ("AutoConfig", "AutoModel")
"""How the keys begin that matter to attention; others name tokenizers and processors."""


def notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a user should know of the code that a config names; nothing where it names none."""
    table = config.get("auto_map")
    if not isinstance(table, dict):
        return ()
    names = [value for key, value in table.items() if key.startswith(LOADERS) and isinstance(value, str)]
    places = dict.fromkeys(map(_place, names))
    if not places:
        return ()
    return (
        f"config.json has auto_map: with trust_remote_code=True, transformers runs code from {' and '.join(places)}, "
        "which may ignore num_key_value_heads; open the result without it.",
    )


def _place(name: str) -> str:
    repository, found, _ = name.partition("--")
    return repository if found else f"{name.rpartition('.')[0]}.py beside it"
