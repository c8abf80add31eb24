"""Find the files that the name of a text stands for.

PATH                          a file, a folder of files of one format, or a folder of `datasets.save_to_disk`
hub:NAME[:[CONFIG:]SPLIT]     a dataset of the Hugging Face hub

In a folder, a .json file that does not begin as records do (a config, or dataset_info.json of `datasets`) is left out,
and reported. So are subfolders of models, of runs and of what else `uptrain` writes.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.hf_folder import is_uptrain_output
from model.common.errors import InputError
from model.files.paths import check_name, home_problem, is_plain_name
from model.files.read import MAX_CONFIG_BYTES, MAX_LEVELS, is_lfs_pointer, parse_json, read_bytes_up_to
from model.texts import NEED_PYARROW, READERS, compressed, find_reader, format_of, jsonl
from model.texts.hub import HUB, hub_files
from model.tokenizer import TOKENIZER_JSON, VOCABULARIES

ARROW = "arrow"
DATASET_DICT, STATE, DATASET_INFO = "dataset_dict.json", "state.json", "dataset_info.json"
"""Files of `datasets.save_to_disk`: of a DatasetDict, and two of each Dataset."""


@dataclass(frozen=True)
class TextFiles:
    """The files that one name stands for."""

    name: str
    format: str
    """Name in `READERS`."""
    files: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Files and subfolders of a folder that are left out: see `why_ignored`."""


def find_files(name: str, option: str) -> TextFiles:
    """Return the files of a text. Raises InputError, which names the option, for missing files and unknown formats."""
    if name.startswith(HUB):
        return TextFiles(name, ARROW, hub_files(name))
    if not name:
        raise InputError(f"{option}: the path is empty. Is a variable of the shell unset?")
    if problem := home_problem(name):
        raise InputError(f"{option}: {problem}")
    path = Path(name)
    check_name(path, option)
    if path.is_dir():
        return _find_in_folder(path, option)
    if not path.exists():
        raise InputError(f"{option} {name}: no such file or folder.{_hint(name)}")
    format_name = format_of(path.name)
    if format_name is None:
        raise InputError(f"{option} {name}: not a known format; known are {_known_suffixes()}.")
    return TextFiles(name, format_name, _check_readable((name,)))


def _hint(name: str) -> str:
    """Return what may have been meant by a name that is no file: a pattern, or a dataset of the hub."""
    if any(mark in name for mark in "*?["):
        return " Patterns are not expanded; give the folder, or the option once for each file."
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) and format_of(name) is None
    return f" (A dataset of the hub is {HUB}{name}.)" if is_hub_name else ""


def _find_in_folder(folder: Path, option: str) -> TextFiles:
    _refuse_dataset_dict(folder, option)
    if (folder / STATE).is_file():
        of_dataset = _check_readable(tuple(map(str, _dataset_files(folder))))
        if not of_dataset:
            raise InputError(f"{option} {folder}: a dataset of no records.")
        return TextFiles(str(folder), ARROW, of_dataset)
    if is_uptrain_output(folder):
        raise InputError(
            f"{option} {folder} is a training run, a token cache or logits; give the texts that it was made of."
        )
    formats: dict[str | None, list[str]] = {}
    for path in _visible_files(folder, option):
        is_special = path.exists() and not path.is_file()  # a pipe, a device, or a folder without texts
        formats.setdefault(None if is_special else format_of(path.name), []).append(str(path))
    other = _set_aside(formats)
    ignored = (*formats.pop(None, ()), *other)
    if not formats:
        left_out = [*other, *(path for path in ignored if Path(path).is_dir())]
        why = f" ({left_out[0]} is {why_ignored(left_out[0])}.)" if left_out else ""
        raise InputError(f"{option} {folder}: no file of a known format; known are {_known_suffixes()}.{why}")
    if len(formats) > 1:
        counts = ", ".join(f"{len(paths)} {name} (e.g. {paths[0]})" for name, paths in formats.items())
        each = ", with one --data each" if option == "--data" else ""
        raise InputError(f"{option} {folder}: files of several formats: {counts}; name files of one format{each}.")
    ((name, paths),) = formats.items()
    files = _check_readable(tuple(paths))
    _refuse_second_names(files)
    return TextFiles(str(folder), str(name), files, ignored)


def _refuse_dataset_dict(folder: Path, option: str) -> None:
    """Raise InputError for a DatasetDict, which has several splits."""
    if not (folder / DATASET_DICT).is_file():
        return
    splits = _listed(folder / DATASET_DICT, "splits")
    if not splits or not all(isinstance(split, str) and is_plain_name(split) for split in splits):
        raise InputError(f"{folder / DATASET_DICT} is damaged (splits); save the dataset again.")
    one = " or ".join(f"{option} {folder / split}" for split in splits)
    raise InputError(f"{option} {folder}: a DatasetDict of {len(splits)} splits; name one: {one}.")


def _dataset_files(folder: Path) -> list[Path]:
    """Return the files of a Dataset of `save_to_disk`; none if it is empty.

    Others may lie beside them, such as the results of `map`.
    """
    listed = _listed(folder / STATE, "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
    if not all(isinstance(name, str) and is_plain_name(name) for name in names):
        raise InputError(f"{folder / STATE} is damaged (_data_files); save the dataset again.")
    return [folder / str(name) for name in names]


def _refuse_second_names(files: Iterable[str]) -> None:
    """Raise InputError for a link to another of the files, or one compressed: its text would be read twice."""
    named: dict[object, str] = {}
    for file in files:
        first = named.setdefault(file_identity(file), file)
        if first != file:
            raise InputError(f"{file} and {first} are one file; remove the link.")
        plain = file[: -len(Path(file).suffix)] if compressed.is_compressed(file) else file
        first = named.setdefault(f"text of {plain}", file)
        if first != file:
            raise InputError(f"{file} and {first} seem to be one text, of which one is compressed; remove one of them.")


def file_identity(file: str) -> object:
    """Return a value that all names of a file share, also hard links."""
    stat = Path(file).stat()  # some network disks make up inode numbers, but then they have no hard links
    return (stat.st_dev, stat.st_ino) if stat.st_nlink > 1 else os.path.realpath(file)


def why_ignored(file: str) -> str:
    if Path(file).is_dir():
        return "a model, a run, a token cache or logits"
    return "JSON, but not two or more lines of one object each" if _is_json(file) else "not a known format"


def _is_json(file: str) -> bool:
    return file.lower().endswith(".json")


def _set_aside(formats: dict[str | None, list[str]]) -> list[str]:
    """Take the .json files that hold no records out of the files by format, and return them."""
    other = [path for path in formats.get("jsonl", ()) if _is_json(path) and not _holds_records(path)]
    if not other:
        return []
    formats["jsonl"] = [path for path in formats["jsonl"] if path not in set(other)]
    if not formats["jsonl"]:
        del formats["jsonl"]
    return other


def _holds_records(path: str) -> bool:
    _check_readable((path,))
    return jsonl.holds_records(path)


def _visible_files(folder: Path, option: str) -> Iterator[Path]:
    """Yield all files in a folder and its subfolders, in order, also behind links; hidden ones are left out.

    Of a subfolder without texts (`_has_no_texts`), yield the folder itself; of a Dataset of `save_to_disk`, its own
    files.

    Raises InputError for a subfolder that cannot be read, that links give a second path, or that is a DatasetDict.
    """
    return _files_below(folder, option, 0, {})


def _files_below(folder: Path, option: str, level: int, seen: dict[Path, Path]) -> Iterator[Path]:
    """Yield the files of a folder; `seen` holds the path of each folder by its real path."""
    real = folder.resolve()
    if real in seen:
        raise InputError(f"{folder} and {seen[real]} are one folder; remove the link.")
    seen[real] = folder
    if level > MAX_LEVELS:
        top = next(iter(seen.values()))
        raise InputError(f"{top} holds folders more than {MAX_LEVELS} levels deep; move them elsewhere.")
    try:
        entries = [(path, path.is_dir()) for path in sorted(folder.iterdir())]
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be read: {error.strerror}.") from error
    for path, is_folder in entries:
        if path.name.startswith("."):
            continue
        if is_folder and (path / STATE).is_file() and (path / DATASET_INFO).is_file():
            yield from _dataset_files(path)
        elif is_folder and not _has_no_texts(path):
            _refuse_dataset_dict(path, option)
            yield from _files_below(path, option, level + 1, seen)
        else:
            yield path


def _has_no_texts(folder: Path) -> bool:
    """Return whether a folder is a model's, or one that `uptrain` made: a run, a token cache or logits."""
    try:
        if is_uptrain_output(folder):
            return True
        has_tokenizer = any((folder / name).is_file() for name in (TOKENIZER_JSON, *VOCABULARIES))
        return (folder / "config.json").is_file() and (has_tokenizer or any(folder.glob("*.safetensors")))
    except OSError:
        return False  # which is an error where the folder is listed


def _listed(path: Path, key: str) -> list[Any]:
    """Return a list from a JSON file of `datasets`."""
    content = read_bytes_up_to(path, MAX_CONFIG_BYTES)
    try:
        entries = parse_json(content)[key]
        if not isinstance(entries, list):
            raise TypeError(f"{key} is no list")
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}); save the dataset again.") from error
    return entries


def _check_readable(files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files. Raises InputError for one that cannot be read, is a pointer, or has damaged compression."""
    for file in files:
        if not os.access(file, os.R_OK):
            raise InputError(f"{file} cannot be read: {'no permission' if Path(file).exists() else 'it is missing'}.")
        if not Path(file).is_file():
            raise InputError(f"{file} is not a regular file (a pipe or a device); write the data to a file first.")
        if format_of(file) in NEED_PYARROW:
            check_name(Path(file), "a Parquet or Arrow file")  # pyarrow takes no other names
        if is_lfs_pointer(Path(file)):
            raise InputError(f"{file} is a git-lfs pointer, not the text itself; run `git lfs pull` in its folder.")
        if compressed.is_compressed(file):
            compressed.check(file)
    return files


def _known_suffixes() -> str:
    suffixes = [suffix for name in READERS for suffix in find_reader(name).SUFFIXES]
    plain = [suffix for suffix in suffixes if not compressed.is_compressed(suffix)]
    packable = [suffix for suffix in plain if f"{suffix}{compressed.SUFFIXES[0]}" in suffixes]
    return f"{', '.join(plain)} ({', '.join(packable)} also with {', '.join(compressed.SUFFIXES)})"
