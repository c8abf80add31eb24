"""Datasets of the Hugging Face hub, through the `datasets` library.

hub:NAME[:[CONFIG:]SPLIT] names one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.common.errors import InputError

HUB = "hub:"


def hub_files(text: str) -> tuple[str, ...]:
    """Return the Arrow files that `datasets` keeps of hub:NAME…, fetching them if they are not there yet.

    Raises InputError, with how to fetch them, where that is not possible.
    """
    datasets = _library()
    name, *rest = text.removeprefix(HUB).split(":")
    if len(rest) > 2 or not name:
        raise InputError(f"{text} is not hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT.")
    config, split = (None, *rest)[-2:] if rest else (None, None)
    try:
        # Version 3 asks on the terminal whether to run a dataset's script unless told not to; 4 and later run none.
        loaded: Any = datasets.load_dataset(name, config, split=split, trust_remote_code=False)
    except Exception as error:  # the library's readers of a dozen formats raise errors of all kinds
        if _has_script(name):
            raise InputError(
                f"{text} is loaded by a script of its own, which is never run; give its data files themselves."
            ) from error
        raise InputError(
            f"{text} cannot be loaded ({' '.join(str(error).split())[:300]}). Without a network here, run where there "
            f"is one: hf download --repo-type dataset {name} --local-dir FOLDER, and give {HUB}FOLDER."
        ) from error
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            named = ":".join(part for part in (name, config) if part)
            one = " or ".join(f"{HUB}{named}:{found}" for found in loaded)
            raise InputError(f"{text} has {len(loaded)} splits; name one: {one}.")
        (loaded,) = loaded.values()
    return tuple(entry["filename"] for entry in loaded.cache_files)


def hub_texts(text: str) -> Iterator[str]:
    """Yield the column `text` of a dataset. Raises InputError where it is not there, or holds no text."""
    datasets = _library()
    for file in hub_files(text):
        rows: Any = datasets.Dataset.from_file(file)
        if getattr(rows.features.get("text"), "dtype", None) not in ("string", "large_string"):
            raise InputError(f"{text} has no text in a column text; its columns are {', '.join(rows.column_names)}.")
        yield from (row["text"] or "" for row in rows.select_columns("text"))


def _has_script(name: str) -> bool:
    """Say whether a dataset on this machine is a script, or a folder with one of its own name."""
    path = Path(name)
    return path.suffix == ".py" or (path / f"{path.resolve().name}.py").is_file()


def _library() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError("datasets of the hub need the library datasets: pip install 'groupwise[torch]'.") from error
    return datasets
