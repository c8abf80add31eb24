"""Compare the files beside the weights, the index and the record of a converted folder."""

import json

from convert.output.groupwise_json import planned_record
from convert.output.model_card import model_card
from convert.output.side_files import copied_files
from convert.verification.comparison import Comparison
from model.checkpoint.hf_folder import INDEX
from model.checkpoint.safetensors_writer import index_text
from model.common.checks import short_repr
from model.common.file_names import CONVERSION_RECORD, MODEL_CARD
from model.common.files import has_content
from model.common.read_files import parse_json, starts_with_bom

OF_THE_HUB = (".gitattributes", ".gitignore", ".git/", ".cache/")
"""What git and the Hugging Face Hub add to a folder that is uploaded or downloaded."""


def compare_files(comparison: Comparison) -> None:
    """Compare everything in OUT but the tensors. Add to the findings."""
    _compare_config(comparison)
    _compare_side_files(comparison)
    _compare_index(comparison)
    _compare_record(comparison)


def _compare_record(comparison: Comparison) -> None:
    source, plan, record = comparison.source, comparison.plan, comparison.record
    differences = comparison.findings.differences
    reported = [(entry["tensor"], entry.get("heads")) for entry in record["merge_report"]]
    if reported != [(heads.tensors[0], heads.kind) for heads in plan.reported_heads]:
        differences.append(f"{CONVERSION_RECORD} does not report on exactly the converted tensors")
    if record["sha256"].keys() != {name for name, tensor in plan.computed.items() if tensor.layer is not None}:
        differences.append(f"{CONVERSION_RECORD} does not hold the checksums of exactly the converted layers")
    expected = planned_record(source, plan)
    for part in ("source", "geometry"):
        recorded = record[part] if isinstance(record.get(part), dict) else {}
        for key, value in expected[part].items():
            if recorded.get(key) != value:
                differences.append(
                    f"{CONVERSION_RECORD} has {part}.{key} = {short_repr(recorded.get(key))}; it should be "
                    f"{short_repr(value)}"
                )
    recorded_files, files = [x["name"] for x in record["source"]["files"]], [path.name for path in source.weight_files]
    if recorded_files != files:
        differences.append(
            f"{CONVERSION_RECORD} names {short_repr(recorded_files)} as files of the source, which has "
            f"{short_repr(files)}"
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
        elif not has_content(path, content):
            differences.append(f"the file {name} differs from what the conversion writes")
    comparison.findings.n_files = len(expected)
    unexpected = [*sorted(out.side_files.keys() - expected.keys()), *out.skipped_files]
    for name in (name for name in unexpected if name not in OF_THE_HUB):
        differences.append(f"the file {name} is not the source's")
    for shard in out.shards:
        if shard.metadata.get("format") != "pt":
            differences.append(f"the metadata of {shard.name} lacks format: pt")


def _compare_index(comparison: Comparison) -> None:
    out, differences = comparison.out, comparison.findings.differences
    expected, path = index_text(out.shards, out.tensors), out.path / INDEX
    if expected is None:
        if path.exists():
            differences.append(f"{INDEX} exists beside a single model.safetensors")
    else:
        _check_byte_order_mark(comparison, INDEX)
        if parse_json(path.read_bytes()) != json.loads(expected):
            differences.append(f"{INDEX} does not give the true total_size or tensors")
    for extra in {f.name for f in out.path.glob("*.safetensors")} - {f.name for f in out.weight_files}:
        differences.append(f"the weight file {extra} belongs to no tensor of the model")
