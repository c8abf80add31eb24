"""Compare the files beside the weights, the index and the record of a converted folder."""

import json
from math import isclose
from typing import Any

from convert.merging.merge_recipe import MergeRecipe
from convert.output.groupwise_json import LAYER_ERRORS, average_reports, planned_record
from convert.output.model_card import model_card
from convert.output.side_files import copied_files
from convert.planning.latent_plan import LatentPlan
from convert.verification.comparison import Comparison
from model.checkpoint.hf_folder import INDEX
from model.checkpoint.safetensors_writer import index_bytes
from model.common.checks import is_finite, short_repr
from model.families import our_code
from model.files.names import CALIBRATION_TOKENS, CONVERSION_RECORD, MODEL_CARD
from model.files.read import parse_json, starts_with_bom
from model.files.write import has_content

OF_THE_HUB = (".gitattributes", ".gitignore", ".git/", ".cache/")
"""What git and the Hugging Face Hub add to a folder that is uploaded or downloaded."""
REST_OF_RECORD = {"schema", "source", "groups", "geometry", "versions", "merge_report", LAYER_ERRORS, "sha256"}
"""The keys of the record besides the recipe's. Versions are those of the machine that converted."""
REPORT_TOL = 1e-4
"""Tolerance of norms and cosines in the report. Another processor sums float32 in another order."""
ERROR_TOL = 0.05
"""Relative tolerance of a layer's output error, which another processor changes as it changes the layer."""
SMALL_ERROR = 1e-4
"""Absolute tolerance of an output error. The error of a layer without loss is one of rounding."""


def compare_files(comparison: Comparison) -> None:
    """Compare everything in OUT but the tensors. Add to the findings."""
    _compare_config(comparison)
    _compare_side_files(comparison)
    _compare_index(comparison)
    _compare_record(comparison)


def _compare_record(comparison: Comparison) -> None:
    source, plan, record = comparison.source, comparison.plan, comparison.record
    differences = comparison.findings.differences
    _compare_report(comparison)
    _compare_layer_errors(comparison)
    if record["sha256"].keys() != {name for name, tensor in plan.computed.items() if tensor.layer is not None}:
        differences.append(f"{CONVERSION_RECORD} does not hold the checksums of exactly the converted layers")
    for key, (recorded, expected) in _entries(comparison).items():
        if recorded != expected:
            differences.append(
                f"{CONVERSION_RECORD} has {key} = {short_repr(recorded)}; it should be {short_repr(expected)}"
            )
    unknown = record.keys() - plan.recipe.record.keys() - REST_OF_RECORD
    if unknown:
        differences.append(f"{CONVERSION_RECORD} has unknown keys: {short_repr(sorted(unknown))}")
    recorded_files, files = [x["name"] for x in record["source"]["files"]], [path.name for path in source.weight_files]
    if recorded_files != files:
        differences.append(
            f"{CONVERSION_RECORD} names {short_repr(recorded_files)} as files of the source, which has "
            f"{short_repr(files)}"
        )


def _entries(comparison: Comparison) -> dict[str, tuple[Any, Any]]:
    """Return the entries of the record that follow from the source and the recipe, each as recorded and as expected.

    The calibration is compared as it is read.
    """
    source, plan, record = comparison.source, comparison.plan, comparison.record
    recipe = plan.recipe.record if plan.computed else MergeRecipe("mean").record  # of a copy
    planned = dict(recipe)
    if not isinstance(plan, LatentPlan) or "groups" in record:  # earlier versions wrote it for latent attention too
        planned["groups"] = plan.n_kv_heads
    entries = {key: (record.get(key), value) for key, value in planned.items() if key != "calibration"}
    for part, values in planned_record(source, plan).items():
        recorded = record[part] if isinstance(record.get(part), dict) else {}
        entries |= {f"{part}.{key}": (recorded.get(key), value) for key, value in values.items()}
    sizes = {path.name: path.stat().st_size for path in source.weight_files}
    for i, file in enumerate(record["source"]["files"]):
        if file["name"] in sizes:
            entries[f"source.files[{i}].bytes"] = file.get("bytes"), sizes[file["name"]]
    return entries


def _compare_report(comparison: Comparison) -> None:
    """Compare the report on all heads that were recomputed and agree in every byte. Sums of others are rounded."""
    plan, differences, report = comparison.plan, comparison.findings.differences, comparison.record["merge_report"]
    reported = [(entry["tensor"], entry.get("heads")) for entry in report]
    if reported != [(heads.tensor_names[0], heads.kind) for heads in plan.reported_heads]:
        differences.append(f"{CONVERSION_RECORD} does not report on exactly the converted tensors")
        return
    for i, (heads, entry) in enumerate(zip(plan.reported_heads, report, strict=True)):
        groups = comparison.reports.get(heads.label)
        for key, expected in average_reports(groups).items() if groups else ():
            recorded = entry.get(key)
            if not is_finite(recorded) or not isclose(recorded, expected, rel_tol=REPORT_TOL, abs_tol=REPORT_TOL):
                differences.append(
                    f"{CONVERSION_RECORD} has merge_report[{i}].{key} = {short_repr(recorded)}; it should be {expected}"
                )


def _compare_layer_errors(comparison: Comparison) -> None:
    """Compare the layers' output errors, where the layers were recomputed."""
    record, plan, differences = comparison.record, comparison.plan, comparison.findings.differences
    is_calibrated = plan.recipe.text is not None and bool(plan.conversions)
    if is_calibrated and LAYER_ERRORS not in record:
        comparison.findings.unchecked.append(f"{LAYER_ERRORS} of {CONVERSION_RECORD}, which earlier versions left out")
        return
    recorded = record.get(LAYER_ERRORS, [])
    names = [conversion.tensor_names[0] for conversion in plan.conversions] if is_calibrated else []
    if [entry["tensor"] for entry in recorded] != names:
        differences.append(f"{CONVERSION_RECORD} does not give {LAYER_ERRORS} of exactly the converted layers")
        return
    for i, expected in enumerate(comparison.layer_errors):  # none if the layers were not recomputed
        actual, error = recorded[i]["output_error"], expected["output_error"]
        if actual is None or error is None:
            agrees = actual is error
        else:
            agrees = isclose(actual, error, rel_tol=ERROR_TOL, abs_tol=SMALL_ERROR)
        if not agrees:
            differences.append(
                f"{CONVERSION_RECORD} has {LAYER_ERRORS}[{i}].output_error = {short_repr(actual)}; it should be {error}"
            )


def _compare_config(comparison: Comparison) -> None:
    expected, config = json.loads(comparison.plan.config_json), comparison.out.config
    differences = comparison.findings.differences
    _check_byte_order_mark(comparison, "config.json")
    for key in sorted(expected.keys() | config.keys()):
        if key not in config:
            differences.append(f"config.json lacks the key {key}")
        elif key not in expected or json.dumps(config[key]) != json.dumps(expected[key]):
            differences.append(
                f"config.json has {key} = {config[key]!r}; it should be "
                f"{repr(expected[key]) if key in expected else 'absent'}"
            )


def _check_byte_order_mark(comparison: Comparison, name: str) -> None:
    """Add a difference for a byte-order mark in a JSON file of OUT: Groupwise reads it, but transformers does not."""
    out, differences = comparison.out, comparison.findings.differences
    if starts_with_bom(out.path / name):
        differences.append(f"{name} begins with a byte-order mark, which transformers does not read")


def _compare_side_files(comparison: Comparison) -> None:
    source, out, plan, record = comparison.source, comparison.out, comparison.plan, comparison.record
    differences = comparison.findings.differences
    origin = record["source"]["name"], record["source"]["revision"]  # as recorded, because the source may have moved
    expected = {**copied_files(source, plan), MODEL_CARD: model_card(source, plan, origin)}
    for name, content in expected.items():
        path = out.path / name
        if not path.is_file():
            differences.append(f"the file {name} is missing")
        elif not has_content(path, content) and not _is_earlier_code(comparison, name):
            differences.append(f"the file {name} differs from what the conversion writes")
    comparison.findings.n_files = len(expected)
    unexpected = [*sorted(out.side_files.keys() - expected.keys()), *out.skipped_files]
    if plan.recipe.text is None and (out.path / CALIBRATION_TOKENS).exists():
        unexpected.append(CALIBRATION_TOKENS)
    for name in (name for name in unexpected if name not in OF_THE_HUB):
        differences.append(f"the file {name} is not the source's")
    for shard in out.shards:
        if shard.metadata.get("format") != "pt":
            differences.append(f"the metadata of {shard.name} lacks format: pt")


def _is_earlier_code(comparison: Comparison, name: str) -> bool:
    """Return whether a file is Groupwise's modelling code as SOURCE has it: earlier versions copied that."""
    source, path = comparison.source, comparison.out.path / name
    return name in our_code(source.config) and name in source.side_files and has_content(path, source.side_files[name])


def _compare_index(comparison: Comparison) -> None:
    out, differences = comparison.out, comparison.findings.differences
    expected, path = index_bytes(out.shards, out.tensors), out.path / INDEX
    if expected is None:
        if path.exists():
            differences.append(f"{INDEX} exists beside a single model.safetensors")
    else:
        _check_byte_order_mark(comparison, INDEX)
        if parse_json(path.read_bytes()) != json.loads(expected):
            differences.append(f"{INDEX} does not give the true total_size or tensors")
    for extra in {f.name for f in out.path.glob("*.safetensors")} - {f.name for f in out.weight_files}:
        differences.append(f"the weight file {extra} belongs to no tensor of the model")
