"""Print the plan and the result of a conversion as tables, with rich. `--json` prints JSON instead."""

import re
from collections.abc import Sequence
from typing import Any

from model.checkpoint.tensor import layer_number
from model.common.console import console, format_bytes, format_duration, print_key_values, table_with_heading
from model.common.counts import counted
from model.common.printable import one_line


def print_plan(summary: dict[str, Any], done: bool = False, layer_errors: Sequence[dict[str, Any]] = ()) -> None:
    """Print a plan's summary, with estimates unless it is `done`. `layer_errors`: those of `groupwise.json`."""
    cache = summary["kv_cache_bytes_per_token"]
    verb, verb_done = {"repeat": ("repeat", "repeated"), "latent": ("compute", "computed")}.get(
        summary["method"], ("merge", "merged")
    )
    steps = " and ".join(step for step in ("refit", "refine") if summary.get(step))
    method = f", method {summary['method']}{f' with {steps}' if steps else ''}" if summary["n_computed"] else ""
    print_key_values(
        f"{summary['source']} → {summary['out']}",
        [
            _attention(summary, method),
            *_tensors(verb_done if done else f"to {verb}", summary, "computed", " in the output"),
            *_tensors("copied" if done else "to copy", summary, "copied"),
            ("output", f"{format_bytes(summary['output_bytes'])} in {counted(summary['n_shards'], 'file')}"),
            ("KV cache per token", f"{format_bytes(cache['before'])} → {format_bytes(cache['after'])} (16 bit)"),
            *([] if done else [("peak memory, estimate", format_bytes(summary["peak_memory_bytes"]))]),
            *_calibration(summary, done),
            *_layer_errors(layer_errors),
            *([("not copied", ", ".join(map(one_line, summary["skipped_files"])))] if summary["skipped_files"] else []),
            *(("note", note) for note in summary["notes"]),
        ],
    )


def _tensors(label: str, summary: dict[str, Any], kind: str, where: str = "") -> list[tuple[str, str]]:
    n, n_bytes = summary[f"n_{kind}"], summary[f"bytes_{kind}"]
    return [(label, f"{counted(n, 'tensor')}, {format_bytes(n_bytes)}{where}")] if n else []


def _attention(summary: dict[str, Any], method: str) -> tuple[str, str]:
    if summary["method"] != "latent":
        return "K/V heads", f"{summary['n_kv_heads_in']} → {summary['groups']}{method}"
    sizes = summary["latent"]
    return "attention", f"{summary['n_kv_heads_in']} K/V heads → latent of {sizes['latent']} and key of {sizes['rope']}"


def _calibration(summary: dict[str, Any], done: bool) -> list[tuple[str, str]]:
    text = summary.get("calibration")
    if not text:
        return []
    n_tokens = text["windows"] * text["window"]
    time, room = format_duration(summary["estimated_calibration_seconds"]), format_bytes(summary["scratch_bytes"])
    work = f"{n_tokens:,} tokens on {summary['device']}"
    return [("calibration", work if done else f"{work}, estimate {time}, with {room} of temporary disk space")]


def _layer_errors(entries: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the row of the layers' output errors: their mean, and the largest with its layer."""
    errors = [(entry["output_error"], entry["tensor"]) for entry in entries if entry["output_error"] is not None]
    if not errors:
        return []
    mean, (largest, tensor) = sum(error for error, _ in errors) / len(errors), max(errors)
    has_two = len({layer_number(entry["tensor"]) for entry in entries}) < len(entries)  # a block of T5's decoder
    where = tensor.rsplit(".", 2)[0] if has_two else f"layer {layer_number(tensor)}"
    return [("attention output error", f"{mean:.1%} on average, at most {largest:.1%} ({where})")]


def print_merge_report(report: list[dict[str, Any]]) -> None:
    """Print the merge report: cosines in groups and norm ratios, for K and V over all layers."""
    table = table_with_heading("Merged heads compared with SOURCE's")
    table.add_column("", overflow="fold")
    for heading in ("cosine\nin groups", "lowest\n(layer)", "norm ÷\nSOURCE's", "lowest\n(layer)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in dict.fromkeys(_kind(entry) for entry in report):
        entries = [entry for entry in report if _kind(entry) == kind]
        table.add_row(kind, *_mean_and_lowest(entries, "mean_cosine"), *_mean_and_lowest(entries, "norm_ratio"))
    console().print(table, "")


def _kind(entry: dict[str, Any]) -> str:
    """Return the layer-independent name of an entry: the end of the tensor's name, and in a fused projection K or V."""
    parts = [part for part in entry["tensor"].removesuffix(".weight").split(".") if not part.isdecimal()]
    name = ".".join(parts[-3 if parts[-1] == "bias" else -2 :])
    return f"{name}, {entry['heads']}" if re.search("(?i)qkv|query_key_value", name) else name


def _mean_and_lowest(entries: list[dict[str, Any]], key: str) -> tuple[str, str]:
    mean = sum(entry[key] for entry in entries) / len(entries)
    lowest = min(entries, key=lambda entry: float(entry[key]))
    return f"{mean:.3f}", f"{lowest[key]:.3f} ({layer_number(lowest['tensor'])})"
