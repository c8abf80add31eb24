"""Record finished work units in a staging area, and join those of other machines."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from model.common.errors import InputError
from model.common.machine import n_cores
from model.files.staging import Staging
from model.files.write import file_sha256
from uptrain.data.prepare.tokenise import shard_names
from uptrain.data.prepare.work_units import Unit, UnitRecord
from uptrain.machine_shards import open_machine_shards

START_BYTES = 8


def record(staging: Staging, unit: Unit, unit_record: UnitRecord) -> None:
    """Record a finished unit in the journal."""
    staging.record_file(str(unit.number), asdict(unit_record))


def load_records(
    staging: Staging, units: list[Unit], dtype: str, verify: bool = False
) -> dict[int, UnitRecord]:  # fmt: skip
    """Return, by number, the units whose cache shards are complete and whose sources are unchanged.

    `verify`: compare the content of the cache shards with their hashes, and not only the sizes.
    """
    records: dict[int, UnitRecord] = {}
    for unit in units:
        entry = staging.finished.get(str(unit.number))
        if entry and entry["identity"] == unit.fingerprint():
            unit_record = UnitRecord(**entry)
            if _is_complete(staging.folder, unit.number, unit_record, dtype):
                records[unit.number] = unit_record
    if not verify:
        return records
    with ThreadPoolExecutor(n_cores()) as pool:
        are_whole = pool.map(partial(_has_recorded_content, staging.folder), records.items())
        return {number: records[number] for number, is_whole in zip(records, are_whole, strict=True) if is_whole}


def _is_complete(folder: Path, number: int, unit_record: UnitRecord, dtype: str) -> bool:
    sizes = unit_record.n_tokens * np.dtype(dtype).itemsize, unit_record.n_documents * START_BYTES
    paths = [folder / name for name in shard_names(number)]
    return all(path.is_file() and path.stat().st_size == size for path, size in zip(paths, sizes, strict=True))


def _has_recorded_content(folder: Path, numbered: tuple[int, UnitRecord]) -> bool:
    number, unit_record = numbered
    hashes = unit_record.tokens_sha256, unit_record.documents_sha256
    return tuple(file_sha256(folder / name) for name in shard_names(number)) == hashes


@contextmanager
def join_machine_shards(
    staging: Staging, units: list[Unit], dtype: str, inputs: Mapping[str, object]
) -> Iterator[None]:  # fmt: skip
    """Move the finished units of all machine shards into `staging`, as `open_machine_shards` opens them.

    Raises InputError if a machine has read other files than those of this command: its work would be lost.
    """
    with open_machine_shards(staging, inputs) as others:
        for other in others:
            _check_same_files(other, units)
        for other in others:
            for number, unit_record in load_records(other, units, dtype).items():
                for name in shard_names(number):
                    (other.folder / name).rename(staging.folder / name)
                record(staging, units[number], unit_record)
        yield


def _check_same_files(other: Staging, units: list[Unit]) -> None:
    entries = {unit: other.finished.get(str(unit.number)) for unit in units}
    differing = [unit for unit, entry in entries.items() if entry and entry["identity"] != unit.fingerprint()]
    if differing:
        raise InputError(
            f"{len(differing):,} finished units in {other.root} are of other files than now: path, size or "
            f"modification time differ, as of {differing[0].pieces[0].path}. Give the files that it read, under the "
            "same paths, or remove it to tokenise these units again."
        )
