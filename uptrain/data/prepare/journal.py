"""The finished units of a staging folder, and those of other machines beside it."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from model.common.errors import InputError
from model.common.staging import Staging
from uptrain.data.prepare.quotas import MachineShard
from uptrain.data.prepare.tokenise import shard_names
from uptrain.data.prepare.work_units import Unit, UnitRecord

START_BYTES = 8


@contextmanager
def open_staging(out: Path, fingerprint: str) -> Iterator[Staging]:
    """Hold the staging folder of `out`. If the input is refused before anything is finished, the folder goes again."""
    with Staging(out.resolve()) as staging:
        kept = f"is finished is kept in {staging.root}, and the"
        try:
            staging.open(fingerprint)
            yield staging
        except InputError as error:
            if not staging.finished:
                staging.discard()
                raise
            raise InputError(f"{error} (What {kept} corrected command goes on from there.)") from error
        except OSError as error:
            raise OSError(f"{error}; what {kept} same command goes on from there.") from error


def target(out: Path, share: MachineShard | None) -> Path:
    """Return the path beside which to build: OUT, or another for a machine's share of it."""
    return out if share is None else out.with_name(f"{out.name}.shard-{share.number}-of-{share.of}")


def record(staging: Staging, unit: Unit, found: UnitRecord) -> None:
    staging.record_file(str(unit.number), asdict(found))


def load_records(staging: Staging, units: list[Unit], dtype: str) -> dict[int, UnitRecord]:
    """Return the units whose shards are in the folder and whose sources are as they were, by number."""
    found = {}
    for unit in units:
        kept = staging.finished.get(str(unit.number))
        if kept and kept["identity"] == unit.identity():
            unit_record = UnitRecord(**kept)
            if _is_whole(staging.folder, unit.number, unit_record, dtype):
                found[unit.number] = unit_record
    return found


def _is_whole(folder: Path, number: int, unit_record: UnitRecord, dtype: str) -> bool:
    sizes = unit_record.n_tokens * np.dtype(dtype).itemsize, unit_record.n_documents * START_BYTES
    paths = [folder / name for name in shard_names(number)]
    return all(path.is_file() and path.stat().st_size == size for path, size in zip(paths, sizes, strict=True))


@contextmanager
def joined(staging: Staging, units: list[Unit], dtype: str, fingerprint: str) -> Iterator[None]:
    """Take over what was finished with `--shard`; if all ends well, what is left of it is removed.

    Raises InputError where a machine is still at it, or made its share in another way.
    """
    pattern = re.compile(re.escape(f".{staging.out.name}.shard-") + r"\d+-of-\d+\.groupwise")
    roots = [path for path in sorted(staging.root.parent.iterdir()) if pattern.fullmatch(path.name)]
    with ExitStack() as held:
        parts = [held.enter_context(_part(root, fingerprint)) for root in roots]
        for part in parts:
            for number, unit_record in load_records(part, units, dtype).items():
                for name in shard_names(number):
                    (part.folder / name).rename(staging.folder / name)
                record(staging, units[number], unit_record)
        yield
        for part in parts:
            part.discard()


@contextmanager
def _part(root: Path, fingerprint: str) -> Iterator[Staging]:
    """Hold the staging folder of a share."""
    with Staging(root.with_name(root.name.removeprefix(".").removesuffix(".groupwise"))) as part:
        if part.begun_with not in (None, fingerprint):
            raise InputError(f"{root} was made with another tokenizer or --text-column; remove it, or use the same.")
        part.open(fingerprint)
        yield part
