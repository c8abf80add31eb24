"""Check a converted folder against its source: recompute every converted tensor, and compare everything else.

The expected tensors depend only on the source, and on OUT's recipe, number of groups and calibration tokens.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from convert.merging.heads import merge_groups
from convert.output.groupwise_json import earlier_conversion, read_record
from convert.output.layer_cache import ConvertedLayerCache
from convert.output.write_shards import digest, scaled_rows
from convert.planning.make_plan import make_plan
from convert.planning.plan import Plan
from convert.verification.comparison import Comparison, Findings
from convert.verification.files import compare_files
from convert.verification.layers import (
    compare_by_errors,
    compare_layer_tensor,
    is_compared_by_errors,
    recompute_layers,
)
from convert.verification.recorded_recipe import recorded_recipe
from model.checkpoint import Checkpoint, open_checkpoint
from model.checkpoint.formats.safetensors import SafetensorsFolder, read_exactly
from model.common import console
from model.common.command_options import AUTO_DEVICE
from model.common.errors import CheckpointError
from model.files.names import CONVERSION_RECORD, RUN_JSON, UPTRAINING_RECORD
from model.files.write import file_sha256, has_content

PIECE = 8 << 20


def verify(
    source: Checkpoint,
    out_path: Path,
    workers: int,
    quiet: bool = True,
    device: str = AUTO_DEVICE,
) -> Findings:
    """Compare the folder `out_path` with a conversion of `source`.

    A calibration is repeated on `device`, with the tokens stored in OUT. The text that OUT names is neither opened nor
    downloaded, because OUT may be untrusted.

    Raises CheckpointError if either cannot be read, if OUT does not record its recipe, or was trained since;
    InputError if the device is not there.
    """
    _check_device(device)
    _check_is_output(source, out_path)
    record, findings = read_record(out_path), Findings()
    with open_checkpoint(out_path) as out, TemporaryDirectory() as folder:
        _check_format(out, out_path)
        plan = _recorded_plan(source, out_path, record, device, findings)
        source_differences = _compare_until_one_is_equal(source, record)
        differences = list(chain.from_iterable(source_differences.values()))
        # If every file differs, all else would differ too, after hours of calibration.
        if source_differences and all(source_differences.values()):
            findings.differences = [f"{out_path} was not made from {source.path} as it is now: {differences[0]}"]
            return findings
        findings.differences += differences
        comparison, scratch = Comparison(source, out, plan, record, findings), Path(folder)
        names = _compare_names(comparison)
        layers = recompute_layers(comparison, scratch, workers, quiet)
        if layers is not None and is_compared_by_errors(plan.recipe) and plan.computed.keys() <= set(names):
            compare_by_errors(comparison, layers, scratch / "scored")
        unread = [path for path in source.weight_files if path not in source_differences]
        _compare_contents(comparison, layers, names, unread, workers, quiet)
        compare_files(comparison)
    return findings


def _check_device(device: str) -> None:
    """Raise InputError if the device is not there, also where nothing was calibrated."""
    if device != AUTO_DEVICE and find_spec("torch") is not None:  # else nothing can run on it
        from model.decoder.devices import find_device

        find_device(device)


def _check_is_output(source: Checkpoint, out_path: Path) -> None:
    """Raise CheckpointError if OUT is a run, was trained since, or is the source, also if SOURCE is the output."""
    if out_path.resolve() == source.path.resolve():
        raise CheckpointError(f"SOURCE and OUT are one folder, {out_path}; the order is convert verify SOURCE OUT.")
    if (out_path / RUN_JSON).is_file():
        raise CheckpointError(
            f"{out_path} is the folder of a run, whose weights are other ones; give the converted model that the run "
            "began with."
        )
    is_converted = (out_path / CONVERSION_RECORD).is_file()
    if out_path.is_dir() and not is_converted and earlier_conversion(source) is not None:
        raise CheckpointError(
            f"{out_path} has no {CONVERSION_RECORD}, so it was not made by convert, or saved again by another program, "
            f"but {source.path} was; the order is convert verify SOURCE OUT."
        )
    trained, known = out_path / UPTRAINING_RECORD, source.side_files.get(UPTRAINING_RECORD)
    # `to-hf` copies the source's.
    if is_converted and trained.is_file() and (known is None or not has_content(trained, known)):
        raise CheckpointError(
            f"{out_path} was trained after its conversion ({UPTRAINING_RECORD}), so its weights are other ones; give "
            "the converted model that the run began with."
        )


def _check_format(out: Checkpoint, out_path: Path) -> None:
    """Raise CheckpointError if the weights of OUT are not in the format that convert writes."""
    if out.format != SafetensorsFolder.format:
        raise CheckpointError(
            f"{out_path} holds weights in another format ({out.format}) than convert writes; give the folder that "
            "convert made."
        )


def _recorded_plan(
    source: Checkpoint, out_path: Path, record: dict[str, Any], device: str, findings: Findings
) -> Plan:  # fmt: skip
    """Return the plan of the conversion that OUT records. Raises CheckpointError if it is not possible."""
    recipe = recorded_recipe(source, out_path, record, device, findings)
    try:
        return make_plan(source, record.get("groups", 0), recipe, None)
    except CheckpointError as error:
        raise CheckpointError(f"{out_path} cannot have been made from {source.path}: {error}") from error


def _compare_names(comparison: Comparison) -> list[str]:
    """Return the tensors with the expected dtype and shape in OUT; record the others as differences."""
    expected_tensors, tensors = comparison.plan.tensors, comparison.out.tensors
    differences = comparison.findings.differences
    for name in expected_tensors.keys() - tensors.keys():
        differences.append(f"the tensor {name} is missing")
    for name in tensors.keys() - expected_tensors.keys():
        differences.append(f"the tensor {name} is not one that the conversion writes")
    same = []
    for name, expected in expected_tensors.items():
        tensor = tensors.get(name)
        if tensor == expected:
            same.append(name)
        elif tensor:
            differences.append(
                f"the tensor {name} is {tensor.dtype} {tensor.shape}; it should be {expected.dtype} {expected.shape}"
            )
    return same


def _compare_contents(
    comparison: Comparison, layers: ConvertedLayerCache | None, names: list[str], unread: list[Path], workers: int,
    quiet: bool,
) -> None:  # fmt: skip
    """Compare the tensors `names`, and with the recorded SHA-256 those of whole layers and the source's `unread` files.

    `layers`: the recomputed layers; None if they cannot be compared.
    """
    plan, findings, stop = comparison.plan, comparison.findings, threading.Event()
    computed = [name for name in names if name in plan.computed]
    checks = {name: partial(_compare_tensor, comparison, layers, name) for name in names}
    digests = [
        *(partial(_compare_source_file, path, comparison.record, stop) for path in unread),
        *(partial(_compare_recorded_tensor, comparison, name) for name in computed if plan.computed[name].layer),
    ]
    findings.differences += _run_checks(comparison.out, checks, digests, stop, plan.workers(workers), quiet)
    findings.n_copied = len(names) - len(computed)
    findings.n_computed = 0 if layers is None else len(computed)


Check = Callable[[], list[str]]
"""A comparison; returns differences, in sentences."""


def _run_checks(
    out: Checkpoint, checks: Mapping[str, Check], digests: Sequence[Check], stop: threading.Event, workers: int,
    quiet: bool,
) -> list[str]:  # fmt: skip
    """Run the comparisons of tensors, by name, and of digests in threads. Return the differences.

    `stop` ends the reading of files: an interrupt must not wait until every file is read.
    """
    differences: list[str] = []
    bar = console.progress_bar("Verifying", sum(out.tensors[name].nbytes for name in checks), quiet)
    with bar as progress, ThreadPoolExecutor(workers) as pool:
        digest_results = [pool.submit(check) for check in digests]
        try:
            for name, difference in zip(checks, pool.map(lambda check: check(), checks.values()), strict=True):
                progress(out.tensors[name].nbytes)
                differences += difference
            for result in digest_results:
                differences += result.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return differences


def _compare_tensor(comparison: Comparison, layers: ConvertedLayerCache | None, name: str) -> list[str]:
    source, out, plan = comparison.source, comparison.out, comparison.plan
    if name in plan.computed:
        layer = plan.computed[name].layer
        if layer is not None:
            return [] if layers is None else compare_layer_tensor(comparison, layer, layers, name)
        expected, origin = _recomputed(comparison, name), "recomputed from the source"
    else:
        expected, origin = _source_bytes(source, name), "copied from the source"
    span = out.span(name)
    assert span is not None  # OUT is safetensors, which stores tensors as plain bytes
    n_compared = 0
    with span.path.open("rb", buffering=0) as file:
        for offset, piece in expected:
            actual = bytearray(len(piece))
            read_exactly(file.fileno(), memoryview(actual), span.offset + offset, span.path)
            if actual != piece:
                return [f"the tensor {name} differs from the one {origin}"]
            n_compared += len(piece)
    assert n_compared == span.length, (name, n_compared, span.length)
    return []


Pieces = Iterator[tuple[int, bytes | bytearray]]
"""The expected content of a tensor of OUT: pieces of bytes, each with its offset."""


def _recomputed(comparison: Comparison, name: str) -> Pieces:
    """Yield a computed tensor. Whoever reads it to its end has the reports on its heads in `comparison`."""
    source, plan = comparison.source, comparison.plan
    output = plan.computed[name]
    row_nbytes = output.tensor.nbytes // (output.tensor.shape[0] if output.tensor.shape else 1)
    for rows in output.copies:
        for at, piece in _read(source, rows.source, rows.source_row, rows.n, row_nbytes):
            yield rows.row * row_nbytes + at, piece
    if output.scaled is not None:
        for row, values in scaled_rows(source, output.tensor, output.scaled):
            yield row * row_nbytes, values.tobytes()
    for merge in output.merges:
        reports = []
        for row, merged, report in merge_groups(source, merge, plan.recipe):
            reports.append(report)
            yield row * row_nbytes, merged.tobytes()
        comparison.reports[merge.merged.label] = reports


def _source_bytes(source: Checkpoint, name: str) -> Pieces:
    span, tensor = source.span(name), source.tensors[name]
    if span is None:
        n_rows = tensor.shape[0]
        yield from _read(source, name, 0, n_rows, max(1, tensor.nbytes // max(n_rows, 1)))
        return
    with span.path.open("rb", buffering=0) as file:
        for start in range(0, span.length, PIECE):
            piece = bytearray(min(PIECE, span.length - start))
            read_exactly(file.fileno(), memoryview(piece), span.offset + start, span.path)
            yield start, piece


def _read(source: Checkpoint, name: str, row: int, n_rows: int, row_nbytes: int) -> Pieces:
    """Read rows of the source in pieces. Offsets are bytes from the first row."""
    step = max(1, PIECE // row_nbytes)
    for start in range(0, n_rows, step):
        rows = source.rows(name, row + start, row + min(start + step, n_rows))
        yield start * row_nbytes, np.ascontiguousarray(rows).tobytes()


def _compare_recorded_tensor(comparison: Comparison, name: str) -> list[str]:
    sha256 = digest(comparison.out.all_rows(name))
    if comparison.record["sha256"].get(name) == sha256:
        return []
    return [f"the tensor {name} has SHA-256 {sha256[:12]}…, not the one recorded at conversion"]


def _compare_until_one_is_equal(source: Checkpoint, record: dict[str, Any]) -> dict[Path, list[str]]:
    """Return how the source's weight files differ from the recorded ones, up to the first that does not."""
    compared: dict[Path, list[str]] = {}
    for path in source.weight_files if record["source"]["files"] else ():
        compared[path] = _compare_source_file(path, record, threading.Event())
        if not compared[path]:
            break
    return compared


def _compare_source_file(path: Path, record: dict[str, Any], stop: threading.Event) -> list[str]:
    recorded = {file["name"]: file["sha256"] for file in record["source"]["files"]}
    sha256 = file_sha256(path, stop)
    if recorded.get(path.name) == sha256:
        return []
    return [f"the source file {path.name} has SHA-256 {sha256[:12]}…, not the one recorded at conversion"]
