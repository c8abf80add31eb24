"""Find the sources that `--data` names: files, folders and hub datasets, each with its format and weight.

PATH              a file, a folder of files of one format, or a folder of `datasets.save_to_disk`
hub:NAME[:[CONFIG:]SPLIT]     a dataset of the Hugging Face hub
…=WEIGHT          any of these, with its weight in a mixture
"""

import json
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from model.common import text_files
from model.common.errors import InputError
from model.common.files import check_name, is_plain_name
from model.common.hub_datasets import HUB, hub_files
from model.common.read_files import CONFIG_BYTES, read_bytes_up_to
from uptrain.data.readers import READERS, find_reader, format_of

ARROW = "arrow"
_WEIGHT = re.compile(r"-?[\d.]{1,40}(?:e[+-]?\d{1,2})?|\d{1,40}/\d{1,40}", re.ASCII | re.IGNORECASE)
"""Weights, which are read exactly. Exponents are limited, since large ones would exhaust memory."""


@dataclass(frozen=True)
class Source:
    """Source that one `--data` names."""

    name: str
    """Value of `--data` without the weight."""
    format: str
    """Name in `READERS`."""
    files: tuple[str, ...]
    weight: Fraction | None = None
    ignored: tuple[str, ...] = ()
    """Files of a folder with an unknown format."""


def find_sources(data: tuple[str, ...]) -> list[Source]:
    """Return the sources in the order given. Raises InputError for missing files and ambiguous names or weights."""
    sources = [_find(*_split_weight(text)) for text in data]
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = next(source.name for source in sources if source.weight is None)
        raise InputError(f"--data {bare} has no weight, but others have; give all of them one (PATH=WEIGHT), or none.")
    return sources


def _split_weight(text: str) -> tuple[str, Fraction | None]:
    """Split PATH=WEIGHT into path and weight; an existing path that contains `=` has no weight."""
    path, equals, digits = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, None
    try:
        if not _WEIGHT.fullmatch(digits):
            raise ValueError("no number, or one of more digits than are read")
        weight = Fraction(digits)
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(f"--data {text}: no such file, and {digits!r} is no weight such as 0.7.") from error
    if weight <= 0:
        raise InputError(f"--data {text}: a weight must be above 0; leave the source out instead.")
    return path, weight


def _find(name: str, weight: Fraction | None) -> Source:
    if name.startswith(HUB):
        return Source(name, ARROW, hub_files(name), weight)
    path = Path(name)
    check_name(path, "--data")
    if path.is_dir():
        return _find_in_folder(path, weight)
    if not path.exists():
        raise InputError(f"--data {name}: no such file or folder. (A dataset of the hub is {HUB}{name}.)")
    format_name = format_of(path.name)
    if format_name is None:
        raise InputError(f"--data {name}: not a known format; known are {_known_suffixes()}.")
    return Source(name, format_name, _check_readable((name,)), weight)


def _find_in_folder(folder: Path, weight: Fraction | None) -> Source:
    if (folder / "dataset_dict.json").is_file():
        splits = _listed(folder / "dataset_dict.json", "splits")
        one = " or ".join(f"--data {folder / split}" for split in splits)
        raise InputError(f"--data {folder}: a DatasetDict of {len(splits)} splits; name one: {one}.")
    if (folder / "state.json").is_file():
        listed = _listed(folder / "state.json", "_data_files")
        names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
        if not names or not all(isinstance(name, str) and is_plain_name(name) for name in names):
            raise InputError(f"{folder / 'state.json'} is damaged (_data_files); save the dataset anew.")
        files = _check_readable(tuple(str(folder / str(name)) for name in names))
        return Source(str(folder), ARROW, files, weight)
    formats: dict[str | None, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            formats.setdefault(format_of(path.name), []).append(str(path))
    ignored = tuple(formats.pop(None, ()))
    if not formats:
        raise InputError(f"--data {folder}: no file of a known format; known are {_known_suffixes()}.")
    if len(formats) > 1:
        counts = ", ".join(f"{len(paths)} {name} (e.g. {paths[0]})" for name, paths in formats.items())
        raise InputError(f"--data {folder}: files of several formats: {counts}; give each its own --data.")
    ((name, paths),) = formats.items()
    return Source(str(folder), str(name), _check_readable(tuple(paths)), weight, ignored)


def _listed(path: Path, key: str) -> list[Any]:
    """Return a list from a JSON file of `datasets`."""
    content = read_bytes_up_to(path, CONFIG_BYTES)
    try:
        entries = json.loads(content)[key]
        if not isinstance(entries, list):
            raise TypeError(f"{key} is no list")
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}); save the dataset anew.") from error
    return entries


def _check_readable(files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files. Raises InputError for one that is unreadable, no regular file, or damaged compressed data."""
    for file in files:
        if not os.access(file, os.R_OK):
            raise InputError(f"{file} cannot be read: {'no permission' if Path(file).exists() else 'it is missing'}.")
        if not Path(file).is_file():
            raise InputError(f"{file} is not a regular file (a pipe or a device); write the data to a file first.")
        if text_files.is_compressed(file):
            text_files.check(file)
    return files


def _known_suffixes() -> str:
    return ", ".join(suffix for name in READERS for suffix in find_reader(name).SUFFIXES)
