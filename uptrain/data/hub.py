"""Datasets of the Hugging Face hub, through the `datasets` library."""

from typing import Any

from model.errors import InputError


def hub_files(text: str) -> tuple[str, ...]:
    """Return the Arrow files that `datasets` keeps of NAME[:[CONFIG:]SPLIT], fetching them if they are not there yet.

    Raises InputError, with how to fetch them, where that is not possible.
    """
    import datasets  # type: ignore[import-untyped]

    name, *rest = text.split(":")
    if len(rest) > 2 or not name:
        raise InputError(f"hub:{text} is not hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT.")
    config, split = (None, *rest)[-2:] if rest else (None, None)
    try:
        loaded: Any = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise InputError(
            f"hub:{text} cannot be loaded ({str(error).splitlines()[0]}). Without a network here, run where there is "
            f"one: hf download --repo-type dataset {name} --local-dir FOLDER, and give that folder as --data."
        ) from error
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            named = ":".join(part for part in (name, config) if part)
            one = " or ".join(f"hub:{named}:{found}" for found in loaded)
            raise InputError(f"hub:{text} has {len(loaded)} splits; name one: {one}.")
        (loaded,) = loaded.values()
    return tuple(entry["filename"] for entry in loaded.cache_files)
