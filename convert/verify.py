"""Check a converted folder against its source: recompute every merged tensor, and compare everything else.

The expected tensors depend only on the source, and on OUT's recipe, number of groups and calibration tokens.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import numpy as np

from convert.calibration.text import NO_TORCH, CalibrationText, read_stored
from convert.conversion import calibrate
from convert.latent.layer import FittedLatent, LatentLayer
from convert.merging.heads import merge_groups
from convert.merging.layer import LayerMerge, LayerWork, MergedLayerCache, attention_of
from convert.merging.methods import LAYER_METHODS, METHODS, REPEAT
from convert.merging.rounding import BFLOAT16, widen
from convert.merging.weights import LayerAttention
from convert.output import config_json
from convert.output.groupwise_json import RECORD_FILE, read_record
from convert.output.model_card import model_card
from convert.output.write_shards import digest, scaled_rows
from convert.planning.latent_plan import make_latent_plan
from convert.planning.latent_recipe import LATENT, LatentRecipe, read_latent_recipe
from convert.planning.plan import Plan, make_plan
from convert.planning.recipe import MAX_TOKENS, Recipe, UnsupportedMethodError
from model.checkpoint import Array, Checkpoint, open_checkpoint
from model.checkpoint.hf_folder import INDEX
from model.checkpoint.writer import index_text
from model.common.command_options import AUTO_DEVICE
from model.common.errors import CheckpointError
from model.common.files import has_content

PIECE = 8 << 20
ROUNDING = 1e-3
"""Tolerances for a layer merged by the weights alone: a tensor's error as a share of its norm, and an element's error
as a share of the tensor's root mean square."""
TENSOR_TOL, ELEMENT_TOL = 1e-2, 0.25
"""The same tolerances for a layer merged with a calibration text.

On another kind of processor, or on a GPU, about one in 10^5 of the drawn keys differs. That changes the tensors of
SmolLM2 by up to 0.0033 of their norms, and single elements by up to 0.14 of their root mean square.
"""
MAX_ERROR_RATIO = 1.05
"""Maximum held-out error of a refined layer, relative to the recomputed layer's. Training amplifies the differences
between processors, so the weights themselves cannot be compared."""


@dataclass
class Findings:
    """Counts of the compared parts, and every difference, in words."""

    n_regrouped: int = 0
    n_copied: int = 0
    n_files: int = 0
    rounded: dict[str, float] = field(default_factory=dict)
    """Merged tensors that differ within the tolerance, as another processor or number of threads may cause: the error
    relative to the tensor's norm."""
    unchecked: list[str] = field(default_factory=list)
    """Parts that could not be compared, each with the reason."""
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if everything was compared and agrees."""
        return not self.differences and not self.unchecked


def verify(
    source: Checkpoint,
    out_path: Path,
    progress: Callable[[int], None],
    workers: int,
    quiet: bool = True,
    device: str = AUTO_DEVICE,
) -> Findings:
    """Compare the folder `out_path` with a conversion of `source`. `progress` counts bytes of OUT's tensors.

    A calibration is repeated on `device`, with the tokens stored in OUT. The text that OUT names is neither opened nor
    downloaded, because OUT may be untrusted.

    Raises CheckpointError if either cannot be read, or OUT does not record its recipe.
    """
    record = read_record(out_path)
    findings = Findings()
    with open_checkpoint(out_path) as out, TemporaryDirectory() as scratch:
        plan = _plan(source, record["groups"], _recipe(source, out_path, record, device, findings))
        same_names = _compare_names(plan, out, findings)
        layers = _layers(source, plan, Path(scratch), findings, workers, quiet)
        if layers is not None and _is_compared_by_errors(plan.recipe) and set(plan.regrouped) <= set(same_names):
            _compare_refined(source, out, plan, layers, Path(scratch) / "scored", findings)
        checks = [partial(_compare_tensor, source, out, plan, layers, findings, name) for name in same_names]
        layer_wise = [name for name in same_names if name in plan.regrouped and plan.regrouped[name].layer]
        digests = [
            *(partial(_compare_digest, path, record) for path in source.weight_files),
            *(partial(_compare_written, out, record, name) for name in layer_wise),
        ]
        with ThreadPoolExecutor(plan.workers(workers)) as pool:
            digest_results = [pool.submit(check) for check in digests]
            for name, difference in zip(same_names, pool.map(lambda check: check(), checks), strict=True):
                progress(out.tensors[name].nbytes)
                findings.differences += difference
            for result in digest_results:
                findings.differences += result.result()
        findings.n_copied = len(same_names) - len(plan.regrouped.keys() & set(same_names))
        findings.n_regrouped = 0 if layers is None else len(same_names) - findings.n_copied
        _compare_config(source, out, plan, findings)
        _compare_files(source, out, plan, record, findings)
        _compare_index(out, findings)
        _compare_record(plan, record, findings)
    return findings


def _plan(source: Checkpoint, n_kv_heads: int, recipe: Recipe) -> Plan:
    if isinstance(recipe, LatentRecipe):
        return make_latent_plan(source, recipe, None)
    return make_plan(source, n_kv_heads, recipe, None)


def _recipe(source: Checkpoint, out_path: Path, record: dict[str, Any], device: str, findings: Findings) -> Recipe:
    """Return the recipe that OUT records, for a device.

    If OUT's calibration tokens are not usable, add to `findings.unchecked`.
    """
    if record["method"] not in (*METHODS, *LAYER_METHODS, REPEAT, LATENT):
        raise CheckpointError(f"{out_path / RECORD_FILE} records no method and seed that this version supports.")
    _check_repeatable(record, out_path / RECORD_FILE)
    refit, refine = record.get("refit", False), record.get("refine", 0)
    if type(refine) is not int or not 0 <= refine <= MAX_TOKENS:
        raise CheckpointError(f"{out_path / RECORD_FILE} records that layers were refined on {refine!r} tokens.")
    if type(refit) is not bool or record["seed"] < 0:
        raise CheckpointError(f"{out_path / RECORD_FILE} records no method and seed that this version supports.")
    recorded = record.get("calibration")
    text = None if recorded is None else _stored_text(source, out_path, recorded, device, findings)
    recipe = Recipe(record["method"], record["seed"], refit, refine, text, device)
    if record["method"] == LATENT:
        return read_latent_recipe(record, recipe, out_path / RECORD_FILE)
    try:
        recipe.check()
    except UnsupportedMethodError as error:
        raise CheckpointError(f"{out_path / RECORD_FILE} records a recipe that is not possible: {error}") from error
    return recipe


def _check_repeatable(record: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if OUT was made with an option that only earlier versions had."""
    always = {"renorm": "spread" if record["method"] in LAYER_METHODS else "none", "grouping": "contiguous"}
    for option, value in always.items():
        if record.get(option, value) != value:
            raise CheckpointError(
                f"{path} records {option} = {record[option]!r}, which this version cannot repeat; verify it with the "
                "version of Groupwise that made it."
            )


def _stored_text(
    source: Checkpoint, out_path: Path, recorded: dict[str, Any], device: str, findings: Findings
) -> CalibrationText:  # fmt: skip
    """Return OUT's calibration text, with the tokens stored in OUT if they match the record."""
    try:
        if find_spec("torch") is None:
            raise CheckpointError(NO_TORCH)
        from convert.calibration.layer_stream import check_tokens, open_layers

        text = read_stored(out_path, recorded)
        check_tokens(open_layers(source, text.window, device), text)
        return text
    except CheckpointError as error:
        findings.unchecked.append(f"the merged layers, since the calibration cannot be repeated: {error}")
    return CalibrationText(recorded["text"], recorded["windows"], recorded["window"], None)


def _layers(
    source: Checkpoint, plan: Plan, scratch: Path, findings: Findings, workers: int, quiet: bool
) -> MergedLayerCache | None:  # fmt: skip
    """Return the merged layers; None if they cannot be recomputed."""
    if findings.unchecked:
        return None
    free = shutil.disk_usage(scratch).free
    if plan.scratch_bytes > free:
        raise CheckpointError(
            f"{gettempdir()} has {free / 1e9:.2f} GB free, but {plan.scratch_bytes / 1e9:.2f} GB are needed to run the "
            "calibration again; set TMPDIR to a folder with more free space."
        )
    calibrate(source, plan, scratch, quiet)
    return MergedLayerCache(source, plan.workers(workers), scratch if plan.recipe.text else None)


def _compare_names(plan: Plan, out: Checkpoint, findings: Findings) -> list[str]:
    """Return the tensors with the expected dtype and shape in OUT; record the others as differences."""
    for name in plan.tensors.keys() - out.tensors.keys():
        findings.differences.append(f"the tensor {name} is missing")
    for name in out.tensors.keys() - plan.tensors.keys():
        findings.differences.append(f"the tensor {name} is not in the source")
    same = []
    for name, expected in plan.tensors.items():
        tensor = out.tensors.get(name)
        if tensor == expected:
            same.append(name)
        elif tensor:
            findings.differences.append(
                f"the tensor {name} is {tensor.dtype} {tensor.shape}; it should be {expected.dtype} {expected.shape}"
            )
    return same


def _compare_tensor(
    source: Checkpoint, out: Checkpoint, plan: Plan, layers: MergedLayerCache | None, findings: Findings, name: str
) -> list[str]:
    if name in plan.regrouped and plan.regrouped[name].layer is not None:
        return _compare_merged(out, plan.regrouped[name].layer, layers, findings, name)
    if name in plan.regrouped:
        expected, origin = _recomputed(source, plan, name), "recomputed from the source"
    else:
        expected, origin = _source_bytes(source, name), "copied from the source"
    span = out.span(name)
    assert span is not None, "OUT is safetensors, which stores tensors as plain bytes"
    with span.path.open("rb", buffering=0) as file:
        for offset, piece in expected:
            file.seek(span.offset + offset)
            if file.read(len(piece)) != piece:
                return [f"the tensor {name} differs from the one {origin}"]
    return []


Pieces = Iterator[tuple[int, bytes]]
"""The expected content of a tensor of OUT: pieces of bytes, each with its offset."""


def _compare_merged(
    out: Checkpoint, layer: LayerWork | None, layers: MergedLayerCache | None, findings: Findings, name: str
) -> list[str]:
    """Compare a tensor of a merged layer within a tolerance, because its last digits depend on the order of sums.

    `_compare_written` separately detects any later change, by the recorded checksum.
    """
    if layers is None or layer is None:
        return []
    expected, actual = layers.get(layer).tensors[name], out.rows(name, 0, out.tensors[name].shape[0])
    if actual.tobytes() == expected.tobytes():
        return []
    if _is_compared_by_errors(layer.recipe):
        return []  # see `_compare_refined`
    wide, wide_actual = expected.astype(np.float64), actual.astype(np.float64)
    step = 2.0 ** -(7 if expected.dtype == BFLOAT16 else 10)  # of bfloat16 or float16; sufficient for finer dtypes too
    beyond = np.maximum(np.abs(wide - wide_actual) - step * np.abs(wide), 0) / (np.sqrt(np.mean(wide**2)) or 1.0)
    error = float(np.sqrt(np.mean(beyond**2)))
    tensor_tol, element_tol = (TENSOR_TOL, ELEMENT_TOL) if layer.recipe.text else (ROUNDING, ROUNDING)
    if error <= tensor_tol and beyond.max() <= element_tol:  # false for NaN
        findings.rounded[name] = error
        return []
    return [f"the tensor {name} differs from the one recomputed from the source"]


def _is_compared_by_errors(recipe: Recipe) -> bool:
    """Return whether layers are compared by what they compute, because their weights are not determined by it.

    A latent in other coordinates computes the same.
    """
    return bool(recipe.refine) or (recipe.method == LATENT and recipe.text is not None)


def _compare_refined(
    source: Checkpoint, out: Checkpoint, plan: Plan, layers: MergedLayerCache, scratch: Path, findings: Findings
) -> None:  # fmt: skip
    """Compare layers that were refined or have a latent, and differ from the recomputed ones, by held-out errors."""
    from convert.calibration.solve import held_out_errors

    def versions(index: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return a layer's tensors in OUT, and the recomputed ones."""
        expected = layers.get(plan.works[index]).tensors
        return {name: out.rows(name, 0, out.tensors[name].shape[0]) for name in expected}, expected

    def attentions(index: int) -> list[LayerAttention | FittedLatent]:
        work = plan.works[index]
        wide = ({name: widen(x).astype(np.float64) for name, x in tensors.items()} for tensors in versions(index))
        if isinstance(work, LatentLayer):
            return [work.fitted(tensors) for tensors in wide]
        assert isinstance(work, LayerMerge)
        return [attention_of(tensors, work, work.target) for tensors in wide]

    def differs(index: int) -> bool:
        actual, expected = versions(index)
        return any(actual[name].tobytes() != expected[name].tobytes() for name in expected)

    different = {index for index in range(len(plan.works)) if differs(index)}
    errors = held_out_errors(source, plan.recipe, scratch, different, attentions) if different else {}
    for index, (actual, expected) in errors.items():
        if actual <= MAX_ERROR_RATIO * expected:  # false for NaN
            excess = max(0.0, actual / expected - 1) if expected else 0.0
            findings.rounded |= dict.fromkeys(plan.works[index].tensors, excess)
        else:
            findings.differences.append(
                f"layer {index} was refined; its held-out error is {actual:.4g}, "
                f"where recomputing it gives {expected:.4g}"
            )


def _recomputed(source: Checkpoint, plan: Plan, name: str) -> Pieces:
    regrouped = plan.regrouped[name]
    row_nbytes = regrouped.tensor.nbytes // regrouped.tensor.shape[0]
    for rows in regrouped.copies:
        for at, piece in _read(source, rows.source, rows.source_row, rows.n, row_nbytes):
            yield rows.row * row_nbytes + at, piece
    if regrouped.scaled is not None:
        for row, values in scaled_rows(source, regrouped.scaled):
            yield row * row_nbytes, values.tobytes()
    for merge in regrouped.merges:
        for row, merged, _ in merge_groups(source, merge, plan.recipe):
            yield row * row_nbytes, merged.tobytes()


def _source_bytes(source: Checkpoint, name: str) -> Pieces:
    span, tensor = source.span(name), source.tensors[name]
    if span is None:
        n_rows = tensor.shape[0]
        yield from _read(source, name, 0, n_rows, max(1, tensor.nbytes // max(n_rows, 1)))
        return
    with span.path.open("rb", buffering=0) as file:
        file.seek(span.offset)
        for start in range(0, span.length, PIECE):
            yield start, file.read(min(PIECE, span.length - start))


def _read(source: Checkpoint, name: str, row: int, n_rows: int, row_nbytes: int) -> Pieces:
    """Read rows of the source in pieces. Offsets are bytes from the first row."""
    step = max(1, PIECE // row_nbytes)
    for start in range(0, n_rows, step):
        rows = source.rows(name, row + start, row + min(start + step, n_rows))
        yield start * row_nbytes, np.ascontiguousarray(rows).tobytes()


def _compare_written(out: Checkpoint, record: dict[str, Any], name: str) -> list[str]:
    sha256 = digest(out.rows(name, 0, out.tensors[name].shape[0]))
    if record["sha256"].get(name) == sha256:
        return []
    return [f"the tensor {name} has SHA-256 {sha256[:12]}…, not the one recorded at conversion"]


def _compare_digest(path: Path, record: dict[str, Any]) -> list[str]:
    recorded = {file["name"]: file["sha256"] for file in record["source"]["files"]}
    with path.open("rb", buffering=0) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if recorded.get(path.name) == sha256:
        return []
    return [f"the source file {path.name} has SHA-256 {sha256[:12]}…, not the one recorded at conversion"]


def _compare_config(source: Checkpoint, out: Checkpoint, plan: Plan, findings: Findings) -> None:
    expected = json.loads(config_json.config_text(source, plan))
    for key in sorted(expected.keys() | out.config.keys()):
        if key not in out.config:
            findings.differences.append(f"config.json lacks the key {key}")
        elif key not in expected or json.dumps(out.config[key]) != json.dumps(expected[key]):
            findings.differences.append(
                f"config.json has {key} = {out.config[key]!r}; it should be "
                f"{repr(expected[key]) if key in expected else 'absent'}"
            )


def _compare_files(
    source: Checkpoint, out: Checkpoint, plan: Plan, record: dict[str, Any], findings: Findings
) -> None:  # fmt: skip
    origin = record["source"]["name"], record["source"]["revision"]  # as recorded, because the source may have moved
    expected = {**config_json.copied(source, plan), "README.md": model_card(source, plan, origin)}
    for name, content in expected.items():
        path = out.path / name
        if not path.is_file():
            findings.differences.append(f"the file {name} is missing")
        elif not has_content(path, content):
            findings.differences.append(f"the file {name} differs from what the conversion writes")
    findings.n_files = len(expected)
    for name in [*sorted(out.side_files.keys() - expected.keys()), *out.skipped_files]:
        findings.differences.append(f"the file {name} is not the source's")
    for shard in out.shards:
        if shard.metadata.get("format") != "pt":
            findings.differences.append(f"the metadata of {shard.name} lacks format: pt")


def _compare_index(out: Checkpoint, findings: Findings) -> None:
    expected, path = index_text(out.shards, out.tensors), out.path / INDEX
    if expected is None:
        if path.exists():
            findings.differences.append(f"{INDEX} exists beside a single model.safetensors")
    elif json.loads(path.read_bytes()) != json.loads(expected):
        findings.differences.append(f"{INDEX} does not give the true total_size or tensors")
    for extra in {f.name for f in out.path.glob("*.safetensors")} - {f.name for f in out.weight_files}:
        findings.differences.append(f"the weight file {extra} belongs to no tensor of the model")


def _compare_record(plan: Plan, record: dict[str, Any], findings: Findings) -> None:
    reported = [(entry["tensor"], entry.get("heads")) for entry in record["merge_report"]]
    if reported != [(heads.tensor, heads.kind) for heads in plan.reported]:
        findings.differences.append(f"{RECORD_FILE} does not report on exactly the merged tensors")
