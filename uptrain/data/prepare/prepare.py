"""Make a token cache from sources: plan, tokenise in parallel, publish.

Work units are tokenised into a staging area beside OUT. Its journal records the finished ones, so that a killed build
resumes. The cache is identical, byte for byte, for any number of workers, machines and interruptions.
"""

import hashlib
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.common.console import warn
from model.common.errors import InputError
from model.files.paths import refuse_inside
from model.files.staging import check_out
from uptrain.data.prepare import journal
from uptrain.data.prepare.build import CacheBuild
from uptrain.data.prepare.publish import INPUTS, CacheFormat, publish
from uptrain.data.prepare.quotas import Records, SourceQuota, make_source_quotas
from uptrain.data.prepare.sources import Source, find_sources
from uptrain.data.prepare.tokenise import Job
from uptrain.data.prepare.tokenizer import Tokenizer, load_tokenizer
from uptrain.data.prepare.work_units import Unit, make_units
from uptrain.data.prepare.workers import Pool
from uptrain.data.token_cache import MANIFEST, CacheManifest, TokenCache, id_dtype
from uptrain.machine_shards import MachineShard, open_staging, staging_out

UNITS_FORMAT = 3
"""Version of the content of work units. Increase it with each change, so that units of old versions are not reused."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `uptrain prepare`."""

    data: tuple[str, ...]
    """Sources: see `uptrain.data.prepare.sources`."""
    out: Path
    seq_len: int
    tokenizer: Path | None = None
    vocab_size: int | None = None
    """Vocabulary size of tokenised data, in place of a tokenizer."""
    n_tokens: int | None = None
    """Number of tokens to take; None takes all."""
    text_column: str = "text"
    skip_bad: bool = False
    workers: int = 1
    machine_shard: MachineShard | None = None
    """Tokenise only this machine shard; a later call without it joins all machine shards."""
    option: str = "--data"
    """The option that gave `data`, for messages."""
    temporary: bool = False
    """Whether the caller deletes the cache, and finished units with it."""


@dataclass(frozen=True)
class _Plan:
    sources: list[Source]
    units: list[Unit]
    source_quotas: list[SourceQuota]
    unit_inputs: dict[str, object]
    """Everything that determines the content of a unit, besides its source, each under its name for users."""
    inputs: str
    """Hash of everything that determines the cache."""


def prepare(options: PrepareOptions, quiet: bool = True) -> dict[str, Any]:
    """Make the token cache `options.out`, or a machine shard of it; return a summary.

    Raises InputError for invalid input, and OSError if reading or writing fails. Finished units stay in the staging
    folder, where the corrected command resumes.
    """
    check_out(options.out)
    if not options.out.exists():
        refuse_inside(options.out, options.tokenizer)
    if (options.tokenizer is None) == (options.vocab_size is None):
        raise InputError("give either --tokenizer FOLDER, or --vocab-size for data that is tokenised already.")
    sources = find_sources(options.data, options.option)
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    if tokenizer and tokenizer.eos_id is None:
        warn(
            f"the tokenizer of {options.tokenizer} has no end-of-text token, so documents end without one. Is its "
            "tokenizer_config.json missing?"
        )
    plan = _make_plan(options, sources, tokenizer)
    if options.out.exists():
        return _summary(options.out, _already_complete(options, plan, tokenizer), plan, complete=True)
    vocab_size = tokenizer.vocab_size if tokenizer else options.vocab_size
    assert vocab_size is not None
    cache_format = CacheFormat(
        options.seq_len, id_dtype(vocab_size), vocab_size,
        tokenizer.sha256 if tokenizer else "",
    )  # fmt: skip
    kept = open_staging(
        staging_out(options.out, options.machine_shard),
        plan.unit_inputs,
        continues="the corrected command continues from there, unless it changes the tokenizer or --text-column",
        temporary=options.temporary,
    )
    with kept as staging:
        job = Job(staging.folder, vocab_size, cache_format.dtype, options.text_column, options.skip_bad)
        with Pool(options.workers, job, tokenizer) as pool, ExitStack() as joined:
            if options.machine_shard is None:
                joined.enter_context(
                    journal.join_machine_shards(staging, plan.units, cache_format.dtype, plan.unit_inputs)
                )
            records = journal.load_records(staging, plan.units, cache_format.dtype, verify=True)
            build = CacheBuild(
                plan.source_quotas, options.machine_shard or MachineShard(), staging, pool, options.skip_bad, records
            )
            build.run(quiet)
            if options.machine_shard is not None:
                return _summary_of_machine_shard(options.machine_shard, plan.units, records)
            manifest = publish(build, plan.sources, options.n_tokens, cache_format, plan.inputs, quiet)
    return _summary(options.out, manifest, plan, complete=False)


def _summary(out: Path, manifest: CacheManifest, plan: _Plan, complete: bool) -> dict[str, Any]:
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
        "ignored": [file for source in plan.sources for file in source.text.ignored],
    }


def _summary_of_machine_shard(machine_shard: MachineShard, units: list[Unit], records: Records) -> dict[str, Any]:
    own = [records[unit.number] for unit in units if machine_shard.has(unit.number) and unit.number in records]
    return {
        "shard": f"{machine_shard.number}/{machine_shard.of}",
        "units": len(own),
        "documents": sum(unit_record.n_documents for unit_record in own),
        "tokens": sum(unit_record.n_tokens for unit_record in own),
    }


def _make_plan(options: PrepareOptions, sources: list[Source], tokenizer: Tokenizer | None) -> _Plan:
    units = make_units(sources)
    unit_inputs: dict[str, object] = {
        "version of Groupwise": UNITS_FORMAT,
        **({"tokenizer": tokenizer.sha256} if tokenizer else {"--vocab-size": options.vocab_size}),
        "--text-column": options.text_column,
    }
    weights = [str(source.weight) for source in sources]
    fingerprints = [unit.fingerprint() for unit in units]
    inputs = _hash(
        [_hash(list(unit_inputs.values())), fingerprints, weights, options.seq_len, options.n_tokens, options.skip_bad]
    )
    return _Plan(sources, units, make_source_quotas(sources, units, options.n_tokens), unit_inputs, inputs)


def _difference(options: PrepareOptions, plan: _Plan, tokenizer: Tokenizer | None) -> str:
    """Return words on what the cache OUT was made of, and is not given now."""
    try:
        made = CacheManifest.parse(options.out)
    except InputError:  # damaged, or a teacher's logits
        return "other data or options"
    sources = [(os.path.realpath(s.text.name), None if s.weight is None else float(s.weight)) for s in plan.sources]
    recorded = [(os.path.realpath(source["path"]), source["weight"]) for source in made.sources]
    differences = [
        words
        for words, differs in (
            (f"windows of {made.seq_len:,} tokens", made.seq_len != options.seq_len),
            ("another --vocab-size", tokenizer is None and made.vocab_size != options.vocab_size),
            ("another tokenizer", made.tokenizer_sha256 != (tokenizer.sha256 if tokenizer else "")),
            (f"other {options.option}", recorded != sources),
        )
        if differs
    ]
    return " and ".join(differences) or (
        "texts that have changed since, or with another --tokens, --text-column or --on-bad-record"
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _already_complete(options: PrepareOptions, plan: _Plan, tokenizer: Tokenizer | None) -> CacheManifest:
    """Return the manifest of OUT if it was made by the same plan. Raises InputError if not, or if a file is damaged."""
    out = options.out
    made_from = (out / INPUTS).read_text(errors="replace").strip() if (out / INPUTS).is_file() else ""
    if made_from != plan.inputs:
        kind = "is no token cache"
        if (out / MANIFEST).is_file():
            kind = f"is a cache of {_difference(options, plan, tokenizer)}"
        raise InputError(f"{out} exists, and {kind}; choose another --out, or remove it.")
    try:
        return TokenCache.open(out).manifest
    except InputError as error:
        raise InputError(
            f"{out} exists, but is damaged; remove it, and run the same command ({str(error).rstrip('.')})."
        ) from error
