"""Read datasets of the Hugging Face hub, named hub:NAME[:[CONFIG:]SPLIT], through the `datasets` library."""

import logging
from pathlib import Path
from typing import Any

from model.common import console
from model.common.errors import InputError

HUB = "hub:"


def hub_files(text: str) -> tuple[str, ...]:
    """Return the Arrow files that `datasets` caches for hub:NAME…, and download them if needed.

    Raises InputError, with a command that fetches them, if this fails.
    """
    if "[" in text.removeprefix(HUB).partition(":")[2]:  # its colon would be taken for a separator
        raise InputError(
            f"{text}: a part of a split cannot be named; leave out {text[text.index('[') :]} and take the whole split "
            "(`uptrain prepare --tokens N` takes its first N tokens)."
        )
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError("datasets of the hub need the library datasets: pip install datasets.") from error
    name, *rest = text.removeprefix(HUB).split(":")
    if len(rest) > 2 or not name:
        raise InputError(f"{text} is not hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT.")
    if not console.draws_bars():
        datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would tell of every try without a network
    config, split = (None, *rest)[-2:] if rest else (None, None)
    try:
        # By default version 3 prompts on the terminal to run a dataset's script. Versions 4 and later run none.
        # In memory, which a variable of the environment may ask for, a dataset has no files.
        loaded: Any = datasets.load_dataset(name, config, split=split, trust_remote_code=False, keep_in_memory=False)
    except Exception as error:  # the library's readers of a dozen formats raise any kind of error
        path = Path(name)
        if path.suffix == ".py" or (path / f"{path.resolve().name}.py").is_file():
            raise InputError(
                f"{text} is loaded by a script of its own, which is never run; give its data files themselves."
            ) from error
        raise InputError(
            f"{text} cannot be loaded ({' '.join(str(error).split())[:300]}). Without a network here, fetch its data "
            f"files where there is one (hf download --repo-type dataset {name} --include PATTERN --local-dir FOLDER), "
            "and give FOLDER."
        ) from error
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            named = ":".join(part for part in (name, config) if part)
            one = " or ".join(f"{HUB}{named}:{split_name}" for split_name in loaded)
            raise InputError(f"{text} has {len(loaded)} splits; name one: {one}.")
        (loaded,) = loaded.values()
    return tuple(entry["filename"] for entry in loaded.cache_files)
