"""Publish a token cache: select the needed units, truncate the last one, write the manifest, rename the folder."""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from model.common import console
from model.files.staging import Staging
from model.files.write import file_sha256, sync_file, write_file
from uptrain.data.prepare.build import CacheBuild, check_bad
from uptrain.data.prepare.quotas import Records, finalise_quotas, left_out_warning
from uptrain.data.prepare.sources import Source
from uptrain.data.prepare.tokenise import shard_names
from uptrain.data.prepare.work_units import Unit, UnitRecord, check_unchanged, file_fingerprint
from uptrain.data.prepare.workers import Pool, hash_file
from uptrain.data.token_cache import FILE_HASHES, HASH_DIGITS, MANIFEST, CacheManifest, CacheShard

INPUTS = "inputs.sha256"
"""File of the cache with a hash of its inputs, by which the same command detects that the cache is complete."""


@dataclass(frozen=True)
class CacheFormat:
    """Fields of the manifest that concern the whole cache."""

    seq_len: int
    dtype: str
    vocab_size: int
    tokenizer_sha256: str


Taken = list[tuple[Unit, int]]
"""Needed units, each with the number of tokens to take from it."""


def publish(
    build: CacheBuild, sources: list[Source], n_tokens: int | None, cache_format: CacheFormat, inputs: str, quiet: bool
) -> CacheManifest:
    """Turn the staging area into the cache. Raises InputError if tokens are too few or a source has changed."""
    records, staging = build.records, build.staging
    source_quotas = finalise_quotas(build.source_quotas, n_tokens, records)
    if n_tokens is None and (warning := left_out_warning(source_quotas, records)):
        console.warn(warning)
    taken = [pair for source_quota in source_quotas for pair in source_quota.taken(records)]
    check_bad((records[unit.number] for unit, _ in taken), build.skip_bad, at_end=True)
    if n_other := sum(records[unit.number].other_labels for unit, _ in taken):
        console.warn(
            f"{n_other:,} documents have labels other than their input_ids (such as -100 for a prompt). They are "
            "ignored: all tokens of a document are trained on."
        )
    checksums = _checksums(_paths(taken, records), staging, build.pool, quiet)
    _warn_of_copies(checksums)
    for unit, _ in taken:
        check_unchanged(unit, records[unit.number].fingerprint)
    shards = {
        unit.number: _shard(staging.folder, unit, n, records[unit.number], cache_format.dtype) for unit, n in taken
    }
    described, units = [], [unit for source_quota in source_quotas for unit in source_quota.units]
    for i, source in enumerate(sources):
        of_source = [(unit, n) for unit, n in taken if unit.source == i]
        described.append(_describe(source, of_source, records, shards, checksums))
        n_read = described[-1]["files"]
        n_files = len({piece.path for unit in units if unit.source == i for piece in unit.pieces})  # that hold anything
        if n_read < n_files:
            console.warn(
                f"{source.text.name}: the first {n_read:,} of {n_files:,} files hold the tokens asked for, and the "
                "others are not read. If the files differ in kind, shuffle the documents, or give each kind as --data "
                "PATH=WEIGHT."
            )
    filled = tuple(shard for shard in shards.values() if shard.n_tokens)
    manifest = CacheManifest(**vars(cache_format), shards=filled, sources=tuple(described))
    _write(staging, manifest, inputs)
    staging.publish()
    return manifest


def _paths(taken: Taken, records: Records) -> list[str]:
    """Return the files that the tokens come from, once each."""
    return list(dict.fromkeys(path for unit, n in taken for path in _paths_of_unit(unit, n, records[unit.number])))


def _paths_of_unit(unit: Unit, n: int, unit_record: UnitRecord) -> list[str]:
    """Return the files that the first n tokens of a unit come from; all of its files if it has no more."""
    starts = list(accumulate(unit_record.piece_tokens, initial=0))[:-1]
    is_cut = n < unit_record.n_tokens and len(starts) == len(unit.pieces)
    return [piece.path for i, piece in enumerate(unit.pieces) if not is_cut or starts[i] < n]


def _warn_of_copies(checksums: dict[str, str]) -> None:
    """Warn if files that hold something have the same content."""
    first: dict[str, str] = {}
    copies = [
        (path, first[each])
        for path, each in checksums.items()
        if first.setdefault(each, path) != path and Path(path).stat().st_size
    ]
    if copies:
        more = f" So do {len(copies) - 1:,} more." if len(copies) > 1 else ""
        console.warn(f"{copies[0][0]} has the same content as {copies[0][1]}, so it is trained on twice.{more}")


def _checksums(paths: list[str], staging: Staging, pool: Pool, quiet: bool) -> dict[str, str]:
    """Return the sha256 of source files, from the journal if it is recorded there."""
    fingerprints = {path: file_fingerprint(path) for path in paths}
    entries = {path: staging.finished.get(f"sha256 {path}", {}) for path in paths}
    missing = [path for path in paths if entries[path].get("identity") != fingerprints[path]]
    total = sum(Path(path).stat().st_size for path in missing)
    with console.progress_bar("Checksums of the sources", total, quiet) as advance:
        for path, future in pool.run(hash_file, iter(missing), lambda n_read, _: advance(n_read)):
            entries[path] = {"identity": fingerprints[path], "sha256": future.result()}
            staging.record(f"sha256 {path}", entries[path])
    return {path: entries[path]["sha256"] for path in paths}


def _shard(folder: Path, unit: Unit, n: int, unit_record: UnitRecord, dtype: str) -> CacheShard:
    """Return a unit's cache shard, truncated to its first n tokens."""
    tokens, documents = shard_names(unit.number)
    if n == unit_record.n_tokens:
        hashes = unit_record.tokens_sha256, unit_record.documents_sha256
        return CacheShard(tokens, documents, n, unit_record.n_documents, *hashes)
    starts = np.fromfile(folder / documents, "<i8")
    n_documents = int(np.searchsorted(starts, n))
    sizes = n * np.dtype(dtype).itemsize, n_documents * starts.itemsize
    hashes = _truncate(folder / tokens, sizes[0]), _truncate(folder / documents, sizes[1])
    return CacheShard(tokens, documents, n, n_documents, *hashes)


def _truncate(path: Path, size: int) -> str:
    """Truncate a file; return its new hash. (If killed after this, the unit is rebuilt.)"""
    os.truncate(path, size)
    sync_file(path)
    return file_sha256(path)


def _describe(
    source: Source, taken: Taken, records: Records, shards: dict[int, CacheShard], checksums: dict[str, str]
) -> dict[str, Any]:
    """Return a source's entry in the manifest, for its needed units."""
    paths, units = _paths(taken, records), [unit for unit, _ in taken]
    sums = [checksums[path] for path in paths]
    dropped: Counter[str] = Counter()
    for unit in units:
        dropped.update(records[unit.number].dropped)
    return {
        "path": source.text.name,
        "files": len(paths),
        "bytes": sum(Path(path).stat().st_size for path in paths),
        "sha256": sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest(),
        FILE_HASHES: [each[:HASH_DIGITS] for each in sums],
        "weight": None if source.weight is None else float(source.weight),
        "documents": sum(shards[unit.number].n_documents for unit in units),
        "tokens": sum(shards[unit.number].n_tokens for unit in units),
        "dropped": dict(dropped),
        "skipped": sum(records[unit.number].skipped for unit in units),
    }


def _write(staging: Staging, manifest: CacheManifest, inputs: str) -> None:
    """Write manifest and inputs, and remove all other files that are not cache shards of the manifest."""
    files = {MANIFEST: manifest.to_json(), INPUTS: f"{inputs}\n".encode()}
    staging.keep_only([*files, *(name for shard in manifest.shards for name in (shard.tokens, shard.documents))])
    for name, content in files.items():
        write_file(staging.folder / name, content)
        sync_file(staging.folder / name)
