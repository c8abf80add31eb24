"""Write a plan's output shards with copied and merged tensors, by several workers at a time."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from convert.layer_tensors.converted_layer import ConvertedLayer
from convert.layer_tensors.rounding import DTYPE_ADVICE, read_finite_rows, rounded
from convert.merging.heads import merge_groups
from convert.output.layer_cache import ConvertedLayerCache
from convert.planning.plan import Plan
from convert.planning.tensors import OutputTensor, Rows, Scaled
from model.checkpoint import FLOAT_DTYPES, Array, Checkpoint, Span, TensorInfo
from model.checkpoint.hub import sha256_in_cache
from model.checkpoint.safetensors_writer import ShardFile, header_bytes
from model.common.console import Advance
from model.common.machine import available_memory
from model.files.staging import CHECKSUM, Staging
from model.files.write import file_sha256

COPY_BYTES = 64 << 20
"""Maximum bytes that one task copies."""
ROW_BLOCK_BYTES = 8 << 20
"""Bytes of rows that are rewritten or scaled at a time."""

Task = Callable[[], int]
"""One piece of work; returns its bytes."""


def total_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """Return the total that `Advance` counts: bytes of tensors written and of source files checksummed."""
    return plan.bytes_copied + plan.bytes_computed + sum(path.stat().st_size for path in checkpoint.weight_files)


def write_shards(checkpoint: Checkpoint, plan: Plan, staging: Staging, workers: int, advance: Advance) -> None:
    """Write every shard that the journal lacks, and checksum every source file.

    The first error stops all workers and is raised. The journal keeps the shards and checksums finished by then.
    """
    calibrated = staging.scratch if plan.recipe.text else None
    layers = ConvertedLayerCache(checkpoint, plan.workers(workers), calibrated)
    # If source and output do not fit into memory together, written shards would displace what is still to be read.
    keep_cached = total_bytes(checkpoint, plan) <= available_memory()
    jobs = [_ShardJob(checkpoint, plan, staging, number, layers, keep_cached) for number in range(len(plan.shards))]
    stop = threading.Event()
    checksums = [partial(_record_checksum, staging, path, stop) for path in checkpoint.weight_files]
    pool = ThreadPoolExecutor(plan.workers(workers))

    def work(task: Task) -> None:
        if not stop.is_set():
            advance(task())

    futures: list[Future[None]] = []
    try:
        # Checksum a file while its copies run, so that its bytes are in memory. Start the longest task first.
        for checksum, job in zip_longest(checksums, jobs):
            tasks = [*([checksum] if checksum else ()), *(job.tasks() if job else ())]
            futures += [pool.submit(work, task) for task in tasks]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        for job in jobs:
            job.close()


def _record_checksum(staging: Staging, path: Path, stop: threading.Event) -> int:
    """Record the SHA-256 of a source file in the journal, unless it is there. Return the file's bytes.

    In the hub's cache it is the file's name, and need not be computed: readers refuse a file of the wrong size, and
    `convert verify` compares the record with the content.
    """
    key = checksum_key(path)
    if key not in staging.finished:
        staging.record(key, sha256_in_cache(path) or file_sha256(path, stop))
    return path.stat().st_size


def checksum_key(path: Path) -> str:
    """Return the journal key of a source file's SHA-256."""
    return f"{CHECKSUM}{path.name}"


class _ShardJob:
    """One output shard. The worker that finishes the last task syncs the file, renames it and records it."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, staging: Staging, number: int, layers: ConvertedLayerCache,
        keep_cached: bool,
    ) -> None:  # fmt: skip
        self._checkpoint, self._plan, self._staging = checkpoint, plan, staging
        self._shard = shard = plan.shards[number]
        self._layers, self._keep_cached = layers, keep_cached
        self._path = staging.folder / shard.name
        self._partial = staging.folder / f"{number}.partial"  # the shard's own name may be as long as names can be
        self._tensors = [plan.tensors[name] for name in shard.tensors]
        self._lock = threading.Lock()
        self._left = 0
        self._file: ShardFile | None = None
        self._reports: dict[str, list[dict[str, float]]] = {}
        self._digests: dict[str, str] = {}

    def tasks(self) -> list[Task]:
        if self._shard.name in self._staging.finished and self._is_whole():
            size = sum(tensor.nbytes for tensor in self._tensors)
            return [lambda: size]
        computed = self._plan.computed
        tasks: list[Task] = [
            partial(self._write_computed, computed[name]) for name in self._shard.tensors if name in computed
        ]
        tasks += self._copies()
        self._left = len(tasks)
        return [partial(self._run, task) for task in tasks] or [self._finish]

    def _is_whole(self) -> bool:
        """Return whether the file of an earlier run has the size that it was written with."""
        size = len(header_bytes(self._tensors, self._shard.metadata)) + sum(tensor.nbytes for tensor in self._tensors)
        return self._path.is_file() and self._path.stat().st_size == size

    def _run(self, task: Task) -> int:
        n = task()
        with self._lock:
            self._left -= 1
            last = self._left == 0
        return n + self._finish() if last else n

    def _output(self) -> ShardFile:
        with self._lock:
            if self._file is None:
                self._file = ShardFile(self._partial, self._tensors, self._shard.metadata)
            return self._file

    def _finish(self) -> int:
        self._output().finish(self._keep_cached)
        self._partial.rename(self._path)
        computed = self._plan.computed
        labels = [
            heads.label for name in self._shard.tensors if name in computed for heads in computed[name].reported_heads
        ]
        reports = {label: self._reports[label] for label in labels}
        self._staging.record_file(self._shard.name, {"reports": reports, "sha256": self._digests})
        return 0

    def close(self) -> None:
        """Close the shard, and remove it if it is not finished: no other run continues it."""
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def _write_computed(self, output: OutputTensor) -> int:
        """Write a tensor that differs from the source's: merged or scaled rows, or those of a converted layer."""
        plan, name = self._plan, output.tensor.name
        if output.layer is not None:
            return self._write_of_layer(name, self._layers.get(output.layer))
        if output.scaled is not None:
            for row, values in scaled_rows(self._checkpoint, output.tensor, output.scaled):
                self._output().write_rows(name, row, values)
            return output.tensor.nbytes
        row_nbytes = output.tensor.nbytes // output.tensor.shape[0]
        for rows in output.copies:
            self._copy_rows(name, rows, row_nbytes)
        n_rows = sum(rows.n for rows in output.copies)
        for merge in output.merges:
            reports = []
            for row, merged, report in merge_groups(self._checkpoint, merge, plan.recipe):
                self._output().write_rows(name, row, merged)
                n_rows += len(merged)
                reports.append(asdict(report))
            self._reports[merge.merged.label] = reports
        assert n_rows == output.tensor.shape[0]
        return output.tensor.nbytes

    def _write_of_layer(self, name: str, layer: ConvertedLayer) -> int:
        values = layer.tensors[name]
        self._output().write_rows(name, 0, values)
        self._digests[name] = digest(values)
        for heads in self._plan.computed[name].reported_heads:
            self._reports[heads.label] = [asdict(report) for report in layer.reports[heads.label]]
        return values.nbytes

    def _copy_rows(self, name: str, rows: Rows, row_nbytes: int) -> None:
        span = self._checkpoint.span(rows.source)
        if span is not None:
            piece = Span(span.path, span.offset + rows.source_row * row_nbytes, rows.n * row_nbytes)
            self._output().copy(name, rows.row * row_nbytes, piece)
            return
        step = max(1, ROW_BLOCK_BYTES // row_nbytes)
        for start in range(0, rows.n, step):
            first, stop = rows.source_row + start, rows.source_row + min(start + step, rows.n)
            self._output().write_rows(name, rows.row + start, self._checkpoint.rows(rows.source, first, stop))

    def _copies(self) -> Iterator[Task]:
        """Yield copy tasks. Adjacent tensors are joined and long runs cut, so that workers share evenly."""
        for first, span in self._spans():
            for start in range(0, span.length, COPY_BYTES):
                piece = Span(span.path, span.offset + start, min(COPY_BYTES, span.length - start))
                yield partial(self._copy, first, start, piece)
        for name in self._shard.tensors:
            if name not in self._plan.computed and self._checkpoint.span(name) is None:
                yield partial(self._rewrite, name)

    def _spans(self) -> Iterator[tuple[str, Span]]:
        """Yield the runs of tensors that are adjacent in source and output, by the name of the first tensor."""
        run: tuple[str, Span] | None = None
        for name in self._shard.tensors:
            span = None if name in self._plan.computed else self._checkpoint.span(name)
            if run and span and (span.path, span.offset) == (run[1].path, run[1].offset + run[1].length):
                run = run[0], Span(span.path, run[1].offset, run[1].length + span.length)
                continue
            if run:
                yield run
            run = (name, span) if span else None
        if run:
            yield run

    def _copy(self, name: str, start: int, piece: Span) -> int:
        self._output().copy(name, start, piece)
        return piece.length

    def _rewrite(self, name: str) -> int:
        """Write a tensor that the source stores in another form, a few rows at a time."""
        tensor = self._checkpoint.tensors[name]
        for start, stop in tensor.row_blocks(ROW_BLOCK_BYTES):
            self._output().write_rows(name, start, self._checkpoint.rows(name, start, stop))
        return tensor.nbytes


def scaled_rows(checkpoint: Checkpoint, output: TensorInfo, scaled: Scaled) -> Iterator[tuple[int, Array]]:
    """Yield a scaled tensor a few rows at a time, each with its first row, in the dtype of `output`.

    Raises CheckpointError for NaN or infinity, and for numbers that are too large for the dtype.
    """
    dtype = FLOAT_DTYPES[output.dtype]
    for start, stop in checkpoint.tensors[scaled.source].row_blocks(ROW_BLOCK_BYTES):
        exact = read_finite_rows(checkpoint, scaled.source, start, stop)
        yield start, rounded(output.name, exact * scaled.factor, dtype, DTYPE_ADVICE)


def digest(values: Array) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def journalled(plan: Plan, staging: Staging, key: str) -> dict[str, Any]:
    """Return what the journal holds of all shards: reports of merges, by label, or SHA-256 of merged tensors, by name.

    `key`: "reports" or "sha256".
    """
    return {name: entry for shard in plan.shards for name, entry in staging.finished[shard.name][key].items()}
