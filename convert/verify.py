"""Check a converted folder against its source: read both again, recompute every merged tensor, compare all the rest.

Nothing is taken from the conversion but its method, seed and number of groups.
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

from convert.calibration.text import NO_TORCH, CalibrationText, read_kept
from convert.conversion import calibrate
from convert.merging.heads import merge_groups
from convert.merging.layer import LayerMerge, MergedLayerCache, attention_of
from convert.merging.methods import LAYER_METHODS, METHODS, REPEAT
from convert.merging.rounding import BFLOAT16, widen
from convert.merging.weights import LayerAttention
from convert.output import config_json
from convert.output.model_card import model_card
from convert.output.record import RECORD_FILE, read_record
from convert.output.write import digest
from convert.planning.plan import Plan, make_plan
from convert.planning.recipe import GROUPINGS, MAX_TOKENS, NONE, RENORMS, Recipe
from model.checkpoint import Array, Checkpoint, open_checkpoint
from model.checkpoint.hf_folder import INDEX
from model.checkpoint.writer import index_text
from model.common.errors import CheckpointError
from model.common.files import has_content

PIECE = 8 << 20
ROUNDING = 1e-3
"""How far a tensor of a layer that was merged by the weights alone may be from the recomputed one, as a share of its
norm; and a single number, as a share of their root mean square."""
TENSOR_TOL, ELEMENT_TOL = 1e-2, 0.25
"""The same of a layer merged by what it does on a text.

On another kind of processor some of the keys are drawn differently that calibrating looks at: one in 10^5, which moves
the tensors of SmolLM2 by up to 0.002 of their norms, and single numbers by 0.07 of their root mean square.
"""
WORSE = 1.05
"""How much larger than a recomputed layer's the held-out error of a refined one may be. Training magnifies what differs
between processors, so the weights themselves cannot be compared."""


@dataclass
class Findings:
    """What was compared, and every difference found, in words."""

    n_regrouped: int = 0
    n_copied: int = 0
    n_files: int = 0
    rounded: dict[str, float] = field(default_factory=dict)
    """The merged tensors that another processor, or number of threads, makes a little different: how far, of 1."""
    unchecked: list[str] = field(default_factory=list)
    """What could not be compared, and why."""
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything was compared and agrees."""
        return not self.differences and not self.unchecked


def verify(
    source: Checkpoint,
    out_path: Path,
    progress: Callable[[int], None],
    workers: int,
    quiet: bool = True,
) -> Findings:
    """Compare the folder `out_path` with what converting `source` must give. Progress counts bytes of OUT's tensors.

    A calibration is repeated on the tokens that OUT keeps. The text that OUT names is neither opened nor fetched, since
    OUT may come from anybody.

    Raises CheckpointError if either cannot be read at all or OUT does not say how it was made.
    """
    record = read_record(out_path)
    findings = Findings()
    with open_checkpoint(out_path) as out, TemporaryDirectory() as scratch:
        plan = make_plan(source, record["groups"], _recipe(source, out_path, record, findings), None)
        same_names = _compare_names(plan, out, findings)
        layers = _layers(source, plan, Path(scratch), findings, workers, quiet)
        if layers is not None and plan.recipe.refine and set(plan.regrouped) <= set(same_names):
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


def _recipe(source: Checkpoint, out_path: Path, record: dict[str, Any], findings: Findings) -> Recipe:
    """Return how OUT says it was made; with a remark where it does not keep the tokens it was calibrated on."""
    if record["method"] not in (*METHODS, *LAYER_METHODS, REPEAT):
        raise CheckpointError(f"{out_path / RECORD_FILE} names no method and seed that this version knows.")
    renorm, refit = record.get("renorm", NONE), record.get("refit", False)
    refine, grouping = record.get("refine", 0), record.get("grouping", GROUPINGS[0])
    if type(refine) is not int or not 0 <= refine <= MAX_TOKENS:
        raise CheckpointError(f"{out_path / RECORD_FILE} records that layers were refined on {refine!r} tokens.")
    if renorm not in RENORMS or type(refit) is not bool or record["seed"] < 0 or grouping not in GROUPINGS:
        raise CheckpointError(f"{out_path / RECORD_FILE} names no method and seed that this version knows.")
    recorded = record.get("calibration")
    sample = None if recorded is None else _sample(source, out_path, recorded, findings)
    return Recipe(record["method"], record["seed"], renorm, refit, refine, grouping, sample)


def _sample(source: Checkpoint, out_path: Path, recorded: dict[str, Any], findings: Findings) -> CalibrationText:
    """Return what OUT was calibrated on, with the tokens that it keeps if they are the recorded ones."""
    try:
        if find_spec("torch") is None:
            raise CheckpointError(NO_TORCH)
        from convert.calibration.layer_stream import check_tokens

        sample = read_kept(out_path, recorded)
        check_tokens(source, sample)
        return sample
    except CheckpointError as error:
        findings.unchecked.append(f"the merged layers, since the calibration cannot be repeated: {error}")
    return CalibrationText(recorded["text"], recorded["windows"], recorded["window"], None)


def _layers(
    source: Checkpoint, plan: Plan, scratch: Path, findings: Findings, workers: int, quiet: bool
) -> MergedLayerCache | None:  # fmt: skip
    """Return the merged layers; None where they cannot be recomputed."""
    if findings.unchecked:
        return None
    free = shutil.disk_usage(scratch).free
    if plan.scratch_bytes > free:
        raise CheckpointError(
            f"{gettempdir()} has {free / 1e9:.2f} GB free, but {plan.scratch_bytes / 1e9:.2f} GB are needed to run the "
            "calibration again; set TMPDIR to a folder with more room."
        )
    calibrate(source, plan, scratch, quiet)
    return MergedLayerCache(source, plan.workers(workers), scratch if plan.recipe.sample else None)


def _compare_names(plan: Plan, out: Checkpoint, findings: Findings) -> list[str]:
    """Return the tensors that both have with the right dtype and shape."""
    for name in plan.tensors.keys() - out.tensors.keys():
        findings.differences.append(f"the tensor {name} is missing")
    for name in out.tensors.keys() - plan.tensors.keys():
        findings.differences.append(f"the tensor {name} is not in the source")
    same = []
    for name, expected in plan.tensors.items():
        found = out.tensors.get(name)
        if found == expected:
            same.append(name)
        elif found:
            findings.differences.append(
                f"the tensor {name} is {found.dtype} {found.shape}; it should be {expected.dtype} {expected.shape}"
            )
    return same


def _compare_tensor(
    source: Checkpoint, out: Checkpoint, plan: Plan, layers: MergedLayerCache | None, findings: Findings, name: str
) -> list[str]:
    if name in plan.regrouped and plan.regrouped[name].layer is not None:
        return _compare_merged(out, plan.regrouped[name].layer, layers, findings, name)
    if name in plan.regrouped:
        expected, how = _recomputed(source, plan, name), "recomputed from the source"
    else:
        expected, how = _as_it_is(source, name), "copied from the source"
    span = out.span(name)
    assert span is not None, "OUT is safetensors, whose tensors lie there as they are"
    with span.path.open("rb", buffering=0) as file:
        for offset, piece in expected:
            file.seek(span.offset + offset)
            if file.read(len(piece)) != piece:
                return [f"the tensor {name} differs from the one {how}"]
    return []


Pieces = Iterator[tuple[int, bytes]]
"""What a tensor of OUT must hold: from which byte on, and the bytes."""


def _compare_merged(
    out: Checkpoint, layer: LayerMerge | None, layers: MergedLayerCache | None, findings: Findings, name: str
) -> list[str]:
    """Compare a tensor that came out of many sums, whose last digits depend on the order they are added in.

    What is forgiven for that is no leave to change it afterwards: see `_compare_written`.
    """
    if layers is None or layer is None:
        return []
    expected, found = layers.get(layer).tensors[name], out.rows(name, 0, out.tensors[name].shape[0])
    if found.tobytes() == expected.tobytes():
        return []
    if layer.recipe.refine:
        return []  # see `_compare_refined`
    wanted, got = expected.astype(np.float64), found.astype(np.float64)
    step = 2.0 ** -(7 if expected.dtype == BFLOAT16 else 10)  # of a bfloat16 or half; finer types need no more
    beyond = np.maximum(np.abs(wanted - got) - step * np.abs(wanted), 0) / (np.sqrt(np.mean(wanted**2)) or 1.0)
    apart = float(np.sqrt(np.mean(beyond**2)))
    allowed, allowed_number = (TENSOR_TOL, ELEMENT_TOL) if layer.recipe.sample else (ROUNDING, ROUNDING)
    if apart <= allowed and beyond.max() <= allowed_number:  # not so for NaN
        findings.rounded[name] = apart
        return []
    return [f"the tensor {name} differs from the one recomputed from the source"]


def _compare_refined(
    source: Checkpoint, out: Checkpoint, plan: Plan, layers: MergedLayerCache, scratch: Path, findings: Findings
) -> None:  # fmt: skip
    """Compare refined layers that differ from the recomputed ones by what they do on the text that was held out."""
    from convert.calibration.solve import held_out_errors

    sample = plan.recipe.sample
    assert sample is not None

    def versions(index: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return a layer's tensors as they are in OUT, and as recomputed."""
        expected = layers.get(plan.layers[index]).tensors
        return {name: out.rows(name, 0, out.tensors[name].shape[0]) for name in expected}, expected

    def attentions(index: int) -> list[LayerAttention]:
        merge = plan.layers[index]
        wide = ({name: widen(x).astype(np.float64) for name, x in found.items()} for found in versions(index))
        return [attention_of(tensors, merge) for tensors in wide]

    def differs(index: int) -> bool:
        found, expected = versions(index)
        return any(found[name].tobytes() != expected[name].tobytes() for name in expected)

    different = {index for index in range(len(plan.layers)) if differs(index)}
    errors = held_out_errors(source, sample, scratch, different, attentions) if different else {}
    for index, (theirs, ours) in errors.items():
        if theirs <= WORSE * ours:  # not so for NaN
            findings.rounded |= dict.fromkeys(plan.layers[index].weights, max(0.0, theirs / ours - 1) if ours else 0.0)
        else:
            findings.differences.append(
                f"layer {index} was refined; its held-out error is {theirs:.4g}, where recomputing it gives {ours:.4g}"
            )


def _recomputed(source: Checkpoint, plan: Plan, name: str) -> Pieces:
    regrouped = plan.regrouped[name]
    row_nbytes = regrouped.tensor.nbytes // regrouped.tensor.shape[0]
    for rows in regrouped.copies:
        for at, piece in _read(source, rows.source, rows.source_row, rows.n, row_nbytes):
            yield rows.row * row_nbytes + at, piece
    for merge in regrouped.merges:
        for row, merged, _ in merge_groups(source, merge, plan.recipe):
            yield row * row_nbytes, merged.tobytes()


def _as_it_is(source: Checkpoint, name: str) -> Pieces:
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
    """Read rows of the source, some at a time; offsets count from the first."""
    step = max(1, PIECE // row_nbytes)
    for start in range(0, n_rows, step):
        rows = source.rows(name, row + start, row + min(start + step, n_rows))
        yield start * row_nbytes, np.ascontiguousarray(rows).tobytes()


def _compare_written(out: Checkpoint, record: dict[str, Any], name: str) -> list[str]:
    found = digest(out.rows(name, 0, out.tensors[name].shape[0]))
    if record["sha256"].get(name) == found:
        return []
    return [f"the tensor {name} has SHA-256 {found[:12]}…, not the one recorded at conversion"]


def _compare_digest(path: Path, record: dict[str, Any]) -> list[str]:
    recorded = {file["name"]: file["sha256"] for file in record["source"]["files"]}
    with path.open("rb", buffering=0) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if recorded.get(path.name) == found:
        return []
    return [f"the source file {path.name} has SHA-256 {found[:12]}…, not the one recorded at conversion"]


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
    origin = record["source"]["name"], record["source"]["revision"]  # the same source may lie elsewhere now
    wanted = {**config_json.copied(source, plan), "README.md": model_card(source, plan, origin)}
    for name, content in wanted.items():
        path = out.path / name
        if not path.is_file():
            findings.differences.append(f"the file {name} is missing")
        elif not has_content(path, content):
            findings.differences.append(f"the file {name} differs from what the conversion writes")
    findings.n_files = len(wanted)
    for name in [*sorted(out.side_files.keys() - wanted.keys()), *out.skipped_files]:
        findings.differences.append(f"the file {name} is not the source's")
    for shard in out.shards:
        if shard.metadata.get("format") != "pt":
            findings.differences.append(f"the metadata of {shard.name} lacks format: pt")


def _compare_index(out: Checkpoint, findings: Findings) -> None:
    expected, path = index_text(out.shards, out.tensors), out.path / INDEX
    if expected is None:
        if path.exists():
            findings.differences.append(f"{INDEX} is there beside a single model.safetensors")
    elif json.loads(path.read_bytes()) != json.loads(expected):
        findings.differences.append(f"{INDEX} does not give the true total_size or tensors")
    for extra in {f.name for f in out.path.glob("*.safetensors")} - {f.name for f in out.weight_files}:
        findings.differences.append(f"the weight file {extra} belongs to no tensor of the model")


def _compare_record(plan: Plan, record: dict[str, Any], findings: Findings) -> None:
    reported = [(entry["tensor"], entry.get("heads")) for entry in record["merge_report"]]
    if reported != [(heads.tensor, heads.kind) for heads in plan.reported]:
        findings.differences.append(f"{RECORD_FILE} does not report on exactly the merged tensors")
