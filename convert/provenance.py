"""What the output says about itself: `groupwise.json` for machines, a section of the model card for people.

Neither holds times or paths, so that the same conversion gives the same bytes.
"""

from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from convert.execute import checksum_key, merge_reports, merged_digests
from convert.methods import REPEAT
from convert.plan import Plan
from model.checkpoint import Checkpoint
from model.checkpoint.hub import Origin, origin_of
from model.errors import CheckpointError, InputError
from model.printable import markdown
from model.reading import CONFIG_BYTES, read_bytes_up_to
from model.staging import Staging
from model.typed_json import check_types, parse_object

FILE = "groupwise.json"
SCHEMA = 1
CARD_BEGIN, CARD_END = "<!-- groupwise: begin -->", "<!-- groupwise: end -->"


def build(checkpoint: Checkpoint, plan: Plan, staging: Staging) -> dict[str, Any]:
    """Return the content of `groupwise.json`."""
    name, revision = origin_of(checkpoint.path)
    digests = merged_digests(plan, staging)
    checksums = {path.name: staging.finished[checksum_key(path)] for path in checkpoint.weight_files}
    source: dict[str, Any] = {
        "name": name,
        "revision": revision,
        "format": checkpoint.format,
        "n_kv_heads": plan.geometry.n_kv_heads,
        "files": [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": checksums[path.name]}
            for path in checkpoint.weight_files
        ],
        "groupwise": earlier_conversion(checkpoint),
    }
    return {
        "schema": SCHEMA,
        "source": source,
        **plan.recipe.record,
        "groups": plan.n_kv_heads,
        "geometry": {
            "model_type": plan.code.settings["model_type"] if plan.code else plan.geometry.model_type,
            "n_layers": plan.geometry.n_layers,
            "n_heads": plan.geometry.n_heads,
            "n_kv_heads": plan.n_kv_heads,
            "head_dim": plan.geometry.head_dim,
            "hidden_size": plan.geometry.hidden_size,
        },
        "versions": {name: version(name) for name in ("groupwise", "numpy", "ml-dtypes")},
        "merge_report": _summary(plan, staging),
        "sha256": {name: digests[name] for name in plan.tensors if name in digests},
    }


def _summary(plan: Plan, staging: Staging) -> list[dict[str, Any]]:
    """Return, layer by layer, what became of the heads of each merged tensor: means over its groups."""
    reports = merge_reports(plan, staging)
    return [
        {
            "tensor": heads.tensor,
            "heads": heads.kind,
            "norm_ratio": round(fmean(group["norm_ratio"] for group in reports[heads.label]), 6),
            "mean_cosine": round(fmean(group["mean_cosine"] for group in reports[heads.label]), 6),
        }
        for heads in plan.reported
    ]


def earlier_conversion(checkpoint: Checkpoint) -> Any:
    """Return the source's own `groupwise.json`, if it was converted before."""
    return read(checkpoint.home) if (checkpoint.home / FILE).exists() else None


def read(folder: Path) -> dict[str, Any]:
    """Read a folder's `groupwise.json`. Raises CheckpointError where there is none that we understand."""
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {FILE}, so it was not made by convert and cannot be verified.")
    try:
        content = parse_object(read_bytes_up_to(path, CONFIG_BYTES))
        _check(content)
    except InputError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    if content["schema"] != SCHEMA:
        raise CheckpointError(f"{path} has schema {content['schema']}; this version understands {SCHEMA}.")
    return content


def _check(content: dict[str, Any]) -> None:
    """Raise InputError if a key that is read is missing or of another type."""
    check_types(content, {"schema": int, "method": str, "seed": int, "groups": int, "sha256": dict[str, str]})
    check_types(content, {"source": dict, "merge_report": tuple[dict[str, Any], ...]})
    source = content["source"]
    check_types(source, {"name": str, "revision": str | None, "files": tuple[dict[str, Any], ...]}, "source")
    for i, file in enumerate(source["files"]):
        check_types(file, {"name": str, "sha256": str}, f"source.files[{i}]")
    for i, entry in enumerate(content["merge_report"]):
        check_types(entry, {"tensor": str}, f"merge_report[{i}]")
    if content.get("calibration") is not None:
        check_types(content, {"calibration": dict})
        calibration = {"text": str, "sha256_of_ids": str, "windows": int, "window": int}
        check_types(content["calibration"], calibration, "calibration")


def model_card(checkpoint: Checkpoint, plan: Plan, origin: Origin) -> bytes:
    """Return `README.md`: the source's own card, whole, and a section on the conversion after it."""
    source = checkpoint.side_files.get("README.md")
    if isinstance(source, Path):
        source = read_bytes_up_to(source, CONFIG_BYTES)
    card = source or _front_matter(origin).encode()
    return card.strip() + b"\n\n" + _section(checkpoint, plan, origin).encode()


def _front_matter(origin: Origin) -> str:
    name, revision = origin
    lines = [f"base_model: {name}"] if revision else []
    return "\n".join(["---", *lines, "library_name: transformers", "tags: [groupwise, gqa]", "---"])


def _section(checkpoint: Checkpoint, plan: Plan, origin: Origin) -> str:
    name, revision = origin
    rows = [("Base model", f"{markdown(name)}{f' (revision {revision})' if revision else ''}"), *_facts(plan)]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    quantised = " The source is a GGUF file; where its weights were quantised, so are the values here." * (
        checkpoint.format == "gguf"
    )
    notes = "".join(f"- {markdown(note)}\n" for note in plan.notes)
    return f"""{CARD_BEGIN}
## Conversion by Groupwise

| | |
|---|---|
{table}

{_what_was_done(plan)}{quantised} Details,
with the SHA-256 of every source file, are in `{FILE}`. The base model's licence applies.
{_how_to_open(plan)}{notes}{CARD_END}
"""


def _facts(plan: Plan) -> list[tuple[str, str]]:
    geometry = plan.geometry
    if not plan.regrouped:
        return [("K/V heads", f"{geometry.n_kv_heads} (query heads: {geometry.n_heads})")]
    before = geometry.kv_cache_bytes_per_token(geometry.n_kv_heads)
    after = geometry.kv_cache_bytes_per_token(plan.n_kv_heads)
    return [
        ("K/V heads", f"{geometry.n_kv_heads} → {plan.n_kv_heads} (query heads: {geometry.n_heads})"),
        ("Method", _method(plan)),
        ("KV cache per token, 16 bit", f"{before:,} → {after:,} bytes"),
    ]


def _method(plan: Plan) -> str:
    recipe = plan.recipe
    parts = [f"`{recipe.method}`"]
    if recipe.renorm != "none":
        parts.append(f"renorm {recipe.renorm}")
    if recipe.grouping == "similar":
        parts.append("similar heads grouped")
    if recipe.refit:
        parts.append("output projections refitted")
    if recipe.refine:
        parts.append(f"each layer refined on {recipe.refine:,} tokens")
    if recipe.sample:
        parts.append(f"calibrated on {recipe.sample.n_tokens:,} tokens ({markdown(recipe.sample.label)})")
    return ", ".join(parts)


def _what_was_done(plan: Plan) -> str:
    exactly = "value for value" if plan.rewrites else "byte for byte"
    if not plan.regrouped:
        return f"No heads were merged: the weights are the base model's, {exactly}."
    if plan.recipe.method == REPEAT:
        return (
            "Each K/V head stands here several times, so that tensor parallelism can divide them; the model computes\n"
            f"what the base model does. All other weights are the base model's, {exactly}."
        )
    if plan.recipe.by_layer:
        return (
            "The K/V heads of each group were merged, and queries and output projections changed so that the group\n"
            f"can share them; all other weights are the base model's, {exactly}. Merging costs quality, which\n"
            "*uptraining* restores: measure before you use it as it is."
        )
    return (
        "The K/V heads of each group were merged ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)); all other\n"
        f"weights are the base model's, {exactly}. Merging costs much quality, which *uptraining* restores: do\n"
        "not use this model before."
    )


def _how_to_open(plan: Plan) -> str:
    if plan.code is None:
        return ""
    return (
        f"\nThe stock class of `{plan.geometry.model_type}` cannot hold fewer K/V heads than query heads. Code that\n"
        f"can is in {' and '.join(f'`{name}`' for name in plan.code.files)}; open the model with\n"
        "`trust_remote_code=True`.\n"
    )
