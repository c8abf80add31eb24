"""Build and read `groupwise.json`, the record of a conversion.

The record contains no times and no paths, so the same conversion gives the same bytes.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from convert.latent.latent_recipe import LATENT
from convert.layer_tensors.converted_layer import GroupReport, LayerConversion
from convert.layer_tensors.layer_file import load_output_error
from convert.output.write_shards import checksum_key, journalled
from convert.planning.merge_plan import MergePlan
from convert.planning.plan import Plan
from model.checkpoint import Checkpoint
from model.checkpoint.hub import origin_of
from model.common.checks import is_finite, short_repr
from model.common.errors import CheckpointError, InputError
from model.common.typed_json import check_types, json_bytes, parse_object
from model.files.names import CONVERSION_RECORD
from model.files.read import MAX_CONFIG_BYTES, read_bytes_up_to
from model.files.staging import Staging

SCHEMA = 1
LAYER_ERRORS = "layer_errors"
"""The key of the layers' output errors. Only the record of a calibrated conversion has it."""


def build_record(checkpoint: Checkpoint, plan: Plan, staging: Staging) -> dict[str, Any]:
    """Return the content of `groupwise.json`."""
    name, revision = origin_of(checkpoint.path)
    digests = journalled(plan, staging, "sha256")
    checksums = {path.name: staging.finished[checksum_key(path)] for path in checkpoint.weight_files}
    planned = planned_record(checkpoint, plan)
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": checksums[path.name]}
        for path in checkpoint.weight_files
    ]
    return {
        "schema": SCHEMA,
        "source": {"name": name, "revision": revision, **planned["source"], "files": files},
        **plan.recipe.record,
        **({"groups": plan.n_kv_heads} if isinstance(plan, MergePlan) else {}),
        "geometry": planned["geometry"],
        "versions": {name: version(name) for name in plan.packages},
        "merge_report": _merge_report(plan, staging),
        **_layer_errors(plan, staging),
        "sha256": {name: digests[name] for name in plan.tensors if name in digests},
    }


def planned_record(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """Return the part of `groupwise.json` that follows from the source and the plan, besides the recipe."""
    return {
        "source": {
            "format": checkpoint.format,
            "n_kv_heads": plan.geometry.n_kv_heads,
            "groupwise": earlier_conversion(checkpoint),
        },
        "geometry": {
            "model_type": plan.model_type,
            "n_layers": plan.geometry.n_layers,
            "n_heads": plan.geometry.n_heads,
            "n_kv_heads": plan.n_kv_heads,
            "head_dim": plan.geometry.head_dim,
            "hidden_size": plan.geometry.hidden_size,
        },
    }


def _merge_report(plan: Plan, staging: Staging) -> list[dict[str, Any]]:
    """Return the merge reports of each merged tensor in the order of layers, as means over its groups."""
    reports = journalled(plan, staging, "reports")
    return [
        {
            "tensor": heads.tensor_names[0],
            "heads": heads.kind,
            **average_reports(GroupReport(**group) for group in reports[heads.label]),
        }
        for heads in plan.reported_heads
    ]


def _layer_errors(plan: Plan, staging: Staging) -> dict[str, Any]:
    """Return `layer_errors`: the output error of each layer that a text converted."""
    if plan.recipe.text is None or not plan.conversions:
        return {}
    return {LAYER_ERRORS: layer_errors(plan.conversions, staging.scratch)}


def layer_errors(conversions: Sequence[LayerConversion], folder: Path) -> list[dict[str, Any]]:
    """Read the output errors of layers that the calibration wrote into a folder, each rounded to six digits."""
    errors = [load_output_error(conversion, folder) for conversion in conversions]
    return [
        {"tensor": conversion.tensor_names[0], "output_error": None if error is None else float(f"{error:.6g}")}
        for conversion, error in zip(conversions, errors, strict=True)
    ]


def average_reports(groups: Iterable[GroupReport]) -> dict[str, float]:
    """Return the means over groups that `merge_report` holds, each rounded to six digits."""
    groups = list(groups)
    return {
        "norm_ratio": round(fmean(group.norm_ratio for group in groups), 6),
        "mean_cosine": round(fmean(group.mean_cosine for group in groups), 6),
    }


def earlier_conversion(checkpoint: Checkpoint) -> Any:
    """Return the source's own `groupwise.json`; None if the source is not the output of a conversion."""
    return read_record(checkpoint.config_folder) if (checkpoint.config_folder / CONVERSION_RECORD).exists() else None


def read_record(folder: Path) -> dict[str, Any]:
    """Read a folder's `groupwise.json`. Raises CheckpointError if it is missing, damaged or of another schema."""
    path = folder / CONVERSION_RECORD
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; give a folder that convert made.")
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {CONVERSION_RECORD}, so it was not made by convert and cannot be verified."
        )
    text = read_bytes_up_to(path, MAX_CONFIG_BYTES)
    try:
        content = parse_object(text)
        _check(content)
        json_bytes(content)  # raises for halves of a surrogate pair, which no file can hold
    except (InputError, UnicodeEncodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if content["schema"] != SCHEMA:
        raise CheckpointError(f"{path} has schema {content['schema']}; this version understands {SCHEMA}.")
    return content


def _check(content: dict[str, Any]) -> None:
    """Raise InputError if a key that Groupwise reads is missing or has another type."""
    check_types(content, {"schema": int, "method": str, "seed": int, "sha256": dict[str, str]})
    if content["method"] != LATENT:
        check_types(content, {"groups": int})
    check_types(content, {"source": dict, "merge_report": tuple[dict[str, Any], ...]})
    source = content["source"]
    check_types(source, {"name": str, "revision": str | None, "files": tuple[dict[str, Any], ...]}, "source")
    for i, file in enumerate(source["files"]):
        check_types(file, {"name": str, "sha256": str}, f"source.files[{i}]")
    for i, entry in enumerate(content["merge_report"]):
        check_types(entry, {"tensor": str}, f"merge_report[{i}]")
    check_types({LAYER_ERRORS: content.get(LAYER_ERRORS, [])}, {LAYER_ERRORS: tuple[dict[str, Any], ...]})
    for i, entry in enumerate(content.get(LAYER_ERRORS, [])):
        check_types(entry, {"tensor": str}, f"{LAYER_ERRORS}[{i}]")
        error = entry.get("output_error", -1)
        if error is not None and not (is_finite(error) and error >= 0):
            raise InputError(
                f"{LAYER_ERRORS}[{i}].output_error is {short_repr(error)}, neither null nor a number of at least 0"
            )
    if content.get("calibration") is not None:
        check_types(content, {"calibration": dict})
        calibration = {"text": str, "sha256_of_ids": str, "windows": int, "window": int}
        check_types(content["calibration"], calibration, "calibration")
