"""Write a teacher's logits of a token cache, once for many runs: see `uptrain.data.teacher_logits`.

Shards are written into a staging area beside OUT. Its journal records the finished ones, so that a killed command
resumes. On the same machine the logits are the same, byte for byte, for any interruptions and number of machine shards.
"""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.checkpoint.hub import origin_of
from model.common import console
from model.common.command_options import AUTO_DEVICE
from model.common.errors import InputError
from model.decoder.devices import fast_float32_matmul, out_of_memory_as_run_error
from model.decoder.loading import LanguageModel
from model.files.paths import refuse_inside
from model.files.staging import Staging, check_out, check_room
from model.files.write import sync_file, write_file
from uptrain.budget.conversion_record import conversion_method
from uptrain.data.batch import Batch
from uptrain.data.checks import check_cache_vocabulary, check_tokenizer
from uptrain.data.teacher_logits import (
    MANIFEST,
    VALUES,
    Floats,
    LogitsManifest,
    LogitsShard,
    TeacherLogits,
    window_bytes,
    window_crcs,
    windows_per_shard,
)
from uptrain.data.token_cache import Integers, TokenCache, id_dtype
from uptrain.distributed.accelerator import choose_device, default_precision
from uptrain.machine_shards import MachineShard, open_machine_shards, open_staging, staged_bytes, staging_out
from uptrain.models.checks import check_lm_heads, check_packing
from uptrain.models.load import build_meta_from_folder, load_teacher
from uptrain.runs.fingerprints import model_sha256
from uptrain.training.logits import chunk_logits, micro_batch_without_gradients, tokens_per_chunk


@dataclass(frozen=True)
class TeachOptions:
    """Options of `uptrain teach`."""

    model: Path
    data: Path
    out: Path
    top_k: int
    machine_shard: MachineShard | None = None
    """Compute only the shards of this machine; a later call without it joins those of all machines."""


def teach(options: TeachOptions, quiet: bool = True) -> dict[str, Any]:
    """Write the logits `options.out`, or a machine shard of them; return a summary.

    Raises InputError for invalid input or too little room on the disk, and OSError if writing fails. Finished shards
    stay in the staging area, where the same command resumes.
    """
    check_out(options.out)
    check_lm_heads([options.model])
    cache = TokenCache.open(options.data)
    if conversion_method(options.model) is not None:
        console.warn(
            f"{options.model} is a converted model (groupwise.json); the parent that it was converted from is usually "
            "the better teacher."
        )
    wanted = _wanted_manifest(options, cache)
    if options.out.exists():
        return _summary(options.out, _already_complete(options.out, wanted, cache), was_complete=True)
    refuse_inside(options.out, options.model, options.data)
    n_each = windows_per_shard(wanted.seq_len, wanted.n_windows, wanted.top_k, wanted.dtype)
    own_shard = options.machine_shard or MachineShard()
    parts = [
        (number, np.arange(start, min(start + n_each, wanted.n_windows)))
        for number, start in enumerate(range(0, wanted.n_windows, n_each))
    ]
    own = [(number, windows) for number, windows in parts if own_shard.has(number)]
    n_own = sum(len(windows) for _, windows in own)
    _check_disk_space(options, n_own, wanted)
    inputs = _inputs(wanted)
    kept = open_staging(
        staging_out(options.out, options.machine_shard), inputs, continues="the same command continues from there"
    )
    with kept as staging, ExitStack() as joined:
        others: list[Staging] = []
        if options.machine_shard is None:
            others = joined.enter_context(open_machine_shards(staging, inputs))
        precision = _precision([staging, *others])
        for other in others:
            _move(other, staging)
        missing = [(number, windows) for number, windows in own if not _is_complete(staging, number)]
        n_missing = sum(len(windows) for _, windows in missing)
        if missing:
            with console.progress_bar("Checking the token cache", cache.nbytes, quiet) as advance:
                cache.verify(advance)
        with console.progress_bar("Computing logits", n_missing, quiet, unit="windows") as advance:
            advice = "set ACCELERATE_USE_CPU=true to continue on the CPU"
            with out_of_memory_as_run_error(str(choose_device(AUTO_DEVICE)), advice):
                _write_shards(missing, options.model, cache, wanted, precision, staging, advance)
        if options.machine_shard is not None:
            shard = f"{own_shard.number}/{own_shard.of}"
            return {"shard": shard, "windows": n_own, "windows_in_all": wanted.n_windows}
        manifest = replace(wanted, shards=tuple(LogitsShard(**staging.finished[_name(number)]) for number, _ in parts))
        _publish(manifest, staging)
    return _summary(options.out, manifest, was_complete=False)


def _publish(manifest: LogitsManifest, staging: Staging) -> None:
    staging.keep_only(name for shard in manifest.shards for name in shard.files)
    write_file(staging.folder / MANIFEST, manifest.to_json())
    sync_file(staging.folder / MANIFEST)
    staging.publish()


def _wanted_manifest(options: TeachOptions, cache: TokenCache) -> LogitsManifest:
    """Return the manifest, still without shards. Raises InputError if model, data and top k do not go together."""
    model = build_meta_from_folder(options.model)
    vocab_size = len(model.lm_head_weight)
    try:
        check_tokenizer(cache.manifest.tokenizer_sha256, options.data, options.model)
    except InputError as error:  # the run compares the cache with the student's tokenizer
        raise InputError(
            f"{error} If the student's tokenizer gives the same ids, copy its files into {options.model}."
        ) from error
    check_cache_vocabulary(cache, vocab_size, str(options.data))
    check_packing(model, cache.seq_len)
    if options.top_k > vocab_size:
        raise InputError(f"--top-k {options.top_k}, but {options.model} has {vocab_size} tokens; take that or fewer.")
    return LogitsManifest(
        top_k=options.top_k,
        seq_len=cache.seq_len,
        n_windows=cache.n_windows,
        vocab_size=vocab_size,
        dtype=id_dtype(vocab_size),
        cache_sha256=cache.manifest.sha256,
        teacher=origin_of(options.model)[0],
        teacher_sha256=model_sha256(options.model),
        shards=(),
    )


def _inputs(wanted: LogitsManifest) -> dict[str, object]:
    """Return everything that the shards depend on, each under its name for users."""
    return {
        "version of Groupwise": wanted.format,
        "model": [wanted.teacher_sha256, wanted.vocab_size],
        "token cache": wanted.cache_sha256,
        "--top-k": wanted.top_k,
    }


def _already_complete(out: Path, wanted: LogitsManifest, cache: TokenCache) -> LogitsManifest:
    """Return the manifest of OUT if it is that of `wanted`. Raises InputError if not, or if a file is damaged."""
    damaged = (
        f"{out} exists, and is no folder of teacher's logits, or a damaged one; choose another --out, or remove it"
    )
    try:
        manifest = LogitsManifest.parse(out)
    except InputError as error:
        raise InputError(f"{damaged} ({str(error).rstrip('.')}).") from error
    for name, what in (
        ("top_k", "--top-k"), ("cache_sha256", "token cache"), ("teacher_sha256", "model"),
    ):  # fmt: skip
        if getattr(manifest, name) != getattr(wanted, name):
            raise InputError(f"{out} exists, and is of another {what}; choose another --out, or remove it.")
    try:
        TeacherLogits.open(out, cache)
    except InputError as error:
        raise InputError(f"{damaged} ({str(error).rstrip('.')}).") from error
    return manifest


def _summary(out: Path, manifest: LogitsManifest, was_complete: bool) -> dict[str, Any]:
    nbytes = manifest.n_windows * window_bytes(manifest.seq_len, manifest.top_k, manifest.dtype)
    names = (
        "top_k", "n_windows", "seq_len", "vocab_size", "teacher", "teacher_sha256", "cache_sha256",
        "sha256",
    )  # fmt: skip
    values = {name: getattr(manifest, name) for name in names}
    values["precision"] = manifest.shards[0].precision
    return {"out": str(out), "was_complete": was_complete, "bytes": nbytes, **values}


def _check_disk_space(options: TeachOptions, n_windows: int, wanted: LogitsManifest) -> None:
    """Raise InputError if the disk has too little space for so many windows, less what is staged already."""
    total = n_windows * window_bytes(wanted.seq_len, wanted.top_k, wanted.dtype)
    check_room(
        options.out.resolve(),
        total - staged_bytes(options.out, options.machine_shard),
        "make room, or start again with a lower --top-k, a smaller cache or another --out",
    )


def _name(number: int) -> str:
    """Return the name of a shard in the journal."""
    return f"logits {number}"


def _is_complete(staging: Staging, number: int) -> bool:
    record = staging.finished.get(_name(number))
    return record is not None and all((staging.folder / name).is_file() for name in LogitsShard(**record).files)


def _precision(stagings: Iterable[Staging]) -> str:
    """Return the precision of the shards that are finished; if there are none, that of this device.

    Raises InputError if finished shards have several.
    """
    finished = {record["precision"]: staging for staging in stagings for record in staging.finished.values()}
    if len(finished) > 1:
        parts = " and ".join(f"{precision} ({staging.root})" for precision, staging in sorted(finished.items()))
        raise InputError(f"shards were computed in {parts}; remove those of one precision, and compute them again.")
    return next(iter(finished), None) or default_precision(choose_device(AUTO_DEVICE))


def _move(other: Staging, staging: Staging) -> None:
    """Move the finished shards of another machine into a staging area."""
    for name, record in other.finished.items():
        paths = [other.folder / file for file in LogitsShard(**record).files]
        if all(path.is_file() for path in paths):
            for path in paths:
                path.rename(staging.folder / path.name)
            staging.record_file(name, record)


def _write_shards(
    missing: list[tuple[int, Integers]],
    folder: Path,
    cache: TokenCache,
    wanted: LogitsManifest,
    precision: str,
    staging: Staging,
    advance: Callable[[float], None],
) -> None:
    """Compute and record the missing shards. The model is loaded if there are any."""
    if not missing:
        return
    device = choose_device(AUTO_DEVICE)
    dtypes = np.dtype(VALUES), np.dtype(wanted.dtype).newbyteorder("<")
    teacher = load_teacher(folder, precision, float32_states=True).to(device)
    micro_batch = micro_batch_without_gradients(teacher, cache.seq_len)
    in_bf16 = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with fast_float32_matmul(device.type), torch.inference_mode(), in_bf16:
        for number, windows in missing:
            batches = [
                _top_k_of_windows(teacher, cache, windows[start : start + micro_batch], wanted.top_k, advance)
                for start in range(0, len(windows), micro_batch)
            ]
            if any(np.isnan(values).any() for values, _ in batches):  # an infinite one may be the rest's mass
                raise InputError(
                    f"{folder} computes NaN for {cache.folder}: its weights are damaged, or too large for its dtype."
                )
            parts = zip(zip(*batches, strict=True), dtypes, strict=True)
            values, ids = (np.concatenate(arrays).astype(dtype) for arrays, dtype in parts)
            names = f"values-{number:05}.bin", f"ids-{number:05}.bin", f"crc-{number:05}.bin"
            sums = []
            for name, array in zip(names, (values, ids, window_crcs(values, ids)), strict=True):
                content = array.tobytes()
                write_file(staging.folder / name, content)
                sync_file(staging.folder / name)
                sums.append(hashlib.sha256(content).hexdigest())
            shard = LogitsShard(*names, len(windows), sums[0], sums[1], sums[2], precision)
            staging.record_file(_name(number), vars(shard))


def _top_k_of_windows(
    teacher: LanguageModel, cache: TokenCache, windows: Integers, top_k: int, advance: Callable[[float], None]
) -> tuple[Floats, Integers]:
    """Return the values [B, T − 1, k + 1] and ids [B, T − 1, k] of windows; zeros for padding."""
    device = teacher.lm_head_weight.device
    batch = Batch.read(cache, windows, device)
    is_text_N = (batch.documents_BT[:, :-1] >= 0).flatten()
    size = tokens_per_chunk(teacher, len(is_text_N))
    logits = chunk_logits(teacher, batch, size)
    parts = [top_k_of(logits.of(slice(start, start + size)), top_k) for start in range(0, len(is_text_N), size)]
    values_NL, ids_NK = (torch.cat(tensors).where(is_text_N[:, None], 0) for tensors in zip(*parts, strict=True))
    advance(len(windows))
    shape = (len(windows), cache.seq_len - 1, -1)
    return values_NL.view(shape).cpu().numpy(), ids_NK.view(shape).cpu().numpy()


def top_k_of(logits_NV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the top log-probabilities and the log of the rest's mass, [N, k + 1], and the ids of the top, [N, k].

    The mass is summed over the rest alone, so that a small one is exact; it is −∞ in logarithm if k is the vocabulary.
    """
    log_p_NV = logits_NV.log_softmax(dim=1)
    top = log_p_NV.topk(top_k, dim=1)
    rest_N1 = log_p_NV.scatter(1, top.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat((top.values, rest_N1), dim=1), top.indices
