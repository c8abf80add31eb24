"""Sources → token cache: plan, tokenise in parallel, publish.

Units are tokenised into a staging folder beside OUT, whose journal says which are finished, so that a build goes on
where it was killed. The cache is the same, byte for byte, whatever the number of workers, machines and interruptions.
"""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.common.errors import InputError
from model.common.staging import check_out
from uptrain.data.prepare import journal
from uptrain.data.prepare.build import TokenizeJob
from uptrain.data.prepare.publish import INPUTS, Kind, publish
from uptrain.data.prepare.quotas import MachineShard, Records, SourceQuota, make_lanes
from uptrain.data.prepare.sources import Source, find_sources
from uptrain.data.prepare.tokenise import Job
from uptrain.data.prepare.tokenizer import load_tokenizer, tokenizer_sha256
from uptrain.data.prepare.work_units import Unit, make_units
from uptrain.data.prepare.workers import Pool
from uptrain.data.token_cache import MANIFEST, Manifest

UNITS_FORMAT = 1
"""Raised when units come out otherwise than before, so that none made by an older version is joined."""
UINT16_IDS = 1 << 16


@dataclass(frozen=True)
class PrepareOptions:
    """What is asked for."""

    data: tuple[str, ...]
    """See `uptrain.data.prepare.sources`."""
    out: Path
    seq_len: int
    tokenizer: Path | None = None
    vocab_size: int | None = None
    """For data that is tokenised already, in place of a tokenizer."""
    n_tokens: int | None = None
    """None: all there are."""
    text_column: str = "text"
    skip_bad: bool = False
    workers: int = 1
    share: MachineShard | None = None
    """Do only this part of the work, which a later request without it joins."""


@dataclass(frozen=True)
class _Plan:
    sources: list[Source]
    units: list[Unit]
    lanes: list[SourceQuota]
    fingerprint: str
    """Of all that the content of a unit depends on, but for its source."""
    inputs: str
    """Of all that the cache depends on."""


def prepare(request: PrepareOptions, quiet: bool = True) -> dict[str, Any]:
    """Make the token cache `request.out`, or with `request.share` a part of it; return what it holds.

    Raises InputError for what the user can put right, and OSError if reading or writing fails midway. What is finished
    is kept in the staging folder, and the corrected command goes on from there.
    """
    check_out(request.out)
    plan = _make_plan(request)
    if request.out.exists():
        return _summary(request.out, _already_complete(request.out, plan), plan, complete=True)
    tokenizer = load_tokenizer(request.tokenizer) if request.tokenizer else None
    vocab_size = tokenizer.vocab_size if tokenizer else request.vocab_size
    assert vocab_size is not None
    kind = Kind(
        request.seq_len, "uint16" if vocab_size <= UINT16_IDS else "uint32", vocab_size,
        tokenizer.sha256 if tokenizer else "",
    )  # fmt: skip
    with journal.open_staging(journal.target(request.out, request.share), plan.fingerprint) as staging:
        job = Job(staging.folder, vocab_size, kind.dtype, request.text_column, request.skip_bad)
        with Pool(request.workers, job, tokenizer) as pool, ExitStack() as joined:
            if request.share is None:
                joined.enter_context(journal.joined(staging, plan.units, kind.dtype, plan.fingerprint))
            records = journal.load_records(staging, plan.units, kind.dtype)
            build = TokenizeJob(plan.lanes, request.share or MachineShard(), staging, pool, request.skip_bad, records)
            build.run(quiet)
            if request.share is not None:
                return _summary_of_share(request.share, plan.units, records)
            manifest = publish(build, plan.sources, request.n_tokens, kind, plan.inputs, quiet)
    return _summary(request.out, manifest, plan, complete=False)


def _summary(out: Path, manifest: Manifest, plan: _Plan, complete: bool) -> dict[str, Any]:
    return {
        "out": str(out),
        "was_complete": complete,
        "documents": manifest.n_documents,
        "tokens": manifest.n_tokens,
        "windows": -(-manifest.n_tokens // manifest.seq_len),
        "seq_len": manifest.seq_len,
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "sha256": manifest.sha256,
        "sources": list(manifest.sources),
        "ignored": [file for source in plan.sources for file in source.ignored],
    }


def _summary_of_share(share: MachineShard, units: list[Unit], records: Records) -> dict[str, Any]:
    own = [records[unit.number] for unit in units if share.has(unit) and unit.number in records]
    return {
        "share": f"{share.number}/{share.of}",
        "units": len(own),
        "documents": sum(found.n_documents for found in own),
        "tokens": sum(found.n_tokens for found in own),
    }


def _make_plan(request: PrepareOptions) -> _Plan:
    if (request.tokenizer is None) == (request.vocab_size is None):
        raise InputError("give either --tokenizer FOLDER, or --vocab-size for data that is tokenised already.")
    tokenizer = tokenizer_sha256(request.tokenizer) if request.tokenizer else request.vocab_size
    sources = find_sources(request.data)
    units = make_units(sources)
    fingerprint = _hash([UNITS_FORMAT, tokenizer, request.text_column])
    weights = [str(source.weight) for source in sources]
    identities = [unit.identity() for unit in units]
    inputs = _hash([fingerprint, identities, weights, request.seq_len, request.n_tokens, request.skip_bad])
    return _Plan(sources, units, make_lanes(sources, units, request.n_tokens), fingerprint, inputs)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _already_complete(out: Path, plan: _Plan) -> Manifest:
    """Return what OUT holds if it is what the plan would make. Raises InputError if not."""
    made_from = (out / INPUTS).read_text().strip() if (out / INPUTS).is_file() else ""
    if made_from != plan.inputs:
        kind = "a cache of other data or options" if (out / MANIFEST).is_file() else "no token cache"
        raise InputError(f"{out} exists, and is {kind}; choose another --out, or remove it.")
    return Manifest.parse(out)
