"""Record finished work units in a staging folder, and join those of other machines."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from model.common.errors import InputError
from model.common.files import file_sha256
from model.common.machine import n_cores
from model.common.staging import Staging
from uptrain.data.prepare.quotas import MachineShard
from uptrain.data.prepare.tokenise import shard_names
from uptrain.data.prepare.work_units import Unit, UnitRecord

START_BYTES = 8


@contextmanager
def open_staging(
    out: Path,
    inputs: Mapping[str, object],
    temporary: bool = False,
    continues: str = "the corrected command continues from there, unless it changes the tokenizer or --text-column",
) -> Iterator[Staging]:
    """Open the staging folder of `out`. After an InputError, remove it if no unit with tokens is finished.

    `temporary`: OUT is in a folder that the caller deletes, so no work is kept in it. `continues` says after an
    InputError what continues with the finished work.
    """
    with Staging(out.resolve()) as staging:
        staging.open(inputs)
        try:
            yield staging
        except InputError as error:
            if temporary or not any(finished.get("n_tokens", 1) for finished in staging.finished.values()):
                staging.discard()
                raise
            hint = f"Finished work is kept in {staging.root}, and {continues}."
            raise InputError(f"{error} ({hint})") from error
        except OSError as error:
            if temporary:
                raise
            hint = f"finished work is kept in {staging.root}, and the same command continues from there."
            raise OSError(f"{error}; {hint}") from error


def staging_out(out: Path, machine_shard: MachineShard | None) -> Path:
    """Return the path beside which to stage the build: OUT, or a name of its own for a machine shard."""
    if machine_shard is None:
        return out
    out = out.resolve()  # as `open_machine_shards` finds it, also by a link
    return out.with_name(f"{out.name}.shard-{machine_shard.number}-of-{machine_shard.of}")


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
            "same paths, or remove it to tokenise these units anew."
        )


@contextmanager
def open_machine_shards(staging: Staging, inputs: Mapping[str, object]) -> Iterator[list[Staging]]:
    """Open the staging folders of all machine shards; remove them if the context succeeds.

    Raises InputError if a machine is still working on its shard, or has finished work of other inputs.
    """
    pattern = re.compile(re.escape(f".{staging.out.name}.shard-") + r"\d+-of-\d+\.groupwise")
    roots = [path for path in sorted(staging.root.parent.iterdir()) if pattern.fullmatch(path.name)]
    with ExitStack() as stack:
        others = [stack.enter_context(_open_machine_shard(root, inputs)) for root in roots]
        yield others
        for other in others:
            other.discard()


@contextmanager
def _open_machine_shard(root: Path, inputs: Mapping[str, object]) -> Iterator[Staging]:
    """Open the staging folder of a machine shard."""
    with Staging(root.with_name(root.name.removeprefix(".").removesuffix(".groupwise"))) as staging:
        staging.open(inputs)
        yield staging
