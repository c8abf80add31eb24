"""Find the weight files of a Hugging Face folder, one file or shards with an index, and check the index."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.hf_folder import INDEX, SINGLE
from model.checkpoint.tied import COPIES_OF_SHARED, SHARED
from model.common.errors import CheckpointError
from model.files.paths import is_plain_name, refuse_dangling
from model.files.read import MAX_CONFIG_BYTES, check_regular, parse_json, read_bytes_up_to

SHARD = re.compile(r"(?P<begin>.+)-\d+-of-(?P<of>\d+)\.(?P<suffix>\w+)")


@dataclass(frozen=True)
class WeightFileNames:
    """A format's names: the single file, the index, and the suffix of weight files."""

    single: str
    index: str
    suffix: str

    def is_in(self, folder: Path) -> bool:
        """Return whether a folder has weights of this format; dangling links count."""
        return any(os.path.lexists(folder / name) for name in (self.single, self.index))


SAFETENSORS = WeightFileNames(SINGLE, INDEX, ".safetensors")
PYTORCH = WeightFileNames("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin")


def weight_file_names(folder: Path, names_of: WeightFileNames) -> tuple[list[str], dict[str, str] | None]:
    """Return the names of the weight files in order, and the index's table, tensor → file, if there is an index.

    Raises CheckpointError if a file is missing, or if its name is a path.
    """
    single, index = folder / names_of.single, folder / names_of.index
    if not index.is_file():
        for path in (index, single):
            refuse_dangling(path)
            if path.exists():
                check_regular(path)
        return [names_of.single], None
    table = _read_index(index)
    names = sorted(set(table.values()))
    if single.is_file() and names_of.single not in names:
        raise CheckpointError(
            f"{folder} holds both {names_of.single} and {names_of.index}, which are two models; remove the "
            "outdated one."
        )
    for name in names:
        if not is_plain_name(name):
            raise CheckpointError(f"{index} names {name!r}, which is not a plain file name inside the folder; refused.")
        if not name.endswith(names_of.suffix):
            raise CheckpointError(f"{index} names {name!r}, which is not a {names_of.suffix} file; refused.")
        refuse_dangling(folder / name)
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name}, which is missing; download it again.")
    _refuse_unnamed_shards(index, names)
    return names, table


def _refuse_unnamed_shards(index: Path, names: list[str]) -> None:
    """Raise CheckpointError if the folder has a shard of the same set, as its name says, that the index lacks."""
    of_set = {_shard_set(name): name for name in names if _shard_set(name)}
    for path in sorted(index.parent.iterdir()):
        if path.name not in names and (named := of_set.get(_shard_set(path.name))):
            raise CheckpointError(
                f"{index} names {named} but not {path.name}, which is of the same set by its name. Download the index "
                "again, or move the file away if it is left over from another model."
            )


def _shard_set(name: str) -> tuple[str, ...]:
    """Return what the names of all shards of a model share: for a-00001-of-00003.bin, "a", "00003" and "bin"."""
    match = SHARD.fullmatch(name)
    return match.group("begin", "of", "suffix") if match else ()


def _read_index(path: Path) -> dict[str, str]:
    content = read_bytes_up_to(path, MAX_CONFIG_BYTES)
    try:
        table = parse_json(content)["weight_map"]
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise TypeError("weight_map does not map tensor names to file names")
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a shard index: {error}.") from error
    return table


def check_index(index: Path, tensors: Mapping[str, Iterable[str]], table: dict[str, str] | None) -> None:
    """Check that the index's table and the files' tensors agree. `tensors`: file → tensor names.

    Raises CheckpointError if they do not agree. Without an index (`table` None) nothing is checked.
    """
    if table is None:
        return
    file_of: dict[str, str] = {}
    for file, names in tensors.items():
        for name in names:
            if name in file_of:
                raise CheckpointError(
                    f"{index.parent}: the same tensor is in two shards, {name} in {file_of[name]} and {file}; "
                    "the checkpoint is inconsistent."
                )
            file_of[name] = file
    for name, file in table.items():
        # The Hub's conversion of `.bin` files leaves out tensors that share memory, but leaves their names in the index
        # (as in google/flan-t5-xl).
        if name in COPIES_OF_SHARED and name not in file_of and SHARED in file_of:
            continue
        if file_of.get(name) != file:
            raise CheckpointError(
                f"{index} puts the tensor {name} in {file}, which does not hold it; download both again. If they stay "
                "so, and the model does not need this tensor, remove its entry."
            )
    for name, file in file_of.items():
        if name not in table:
            raise CheckpointError(
                f"{index.parent / file} holds the tensor {name}, which {index.name} does not name; download both again."
            )
