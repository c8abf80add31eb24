"""Print results as tables, with rich. `--json` prints JSON instead."""

import re
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from model.checkpoint.tensor import layer_number
from model.common.console import console, duration, print_key_values, size
from model.common.counts import counted


def print_inspection(summary: dict[str, Any]) -> None:
    """Print the facts of a checkpoint, and a table of the possible numbers of groups."""
    dtypes = ", ".join(f"{dtype} {size(n)}" for dtype, n in summary["bytes_by_dtype"].items())
    print_key_values(
        summary["source"],
        [
            ("model_type", f"{summary['model_type']} ({summary['format']}, {counted(len(summary['files']), 'file')})"),
            (
                "attention",
                f"{summary['attention']}: {summary['n_heads']} query heads, {summary['n_kv_heads']} K/V heads",
            ),
            ("layers", str(summary["n_layers"])),
            ("head size, hidden size", f"{summary['head_dim']}, {summary['hidden_size']}"),
            ("weights", f"{summary['n_tensors']} tensors, {dtypes}"),
            *(
                [("repeat-kv can make", f"{', '.join(map(str, summary['repeats']))} K/V heads")]
                if summary["repeats"]
                else []
            ),
            *_remarks(summary),
        ],
    )
    now = summary["groups"][0]["kv_cache_bytes_per_token"]
    _group_sizes(summary["groups"], now)
    if summary["latent"]:
        _latent_sizes(summary["latent"], now)


def _group_sizes(rows: list[dict[str, Any]], now: int) -> None:
    """Print a table of the possible numbers of groups. `now`: bytes of the source's KV cache per token."""
    table = _table("\nPossible values of --groups")
    for heading in ("groups", "kind", "weights", "KV cache", "of now"):
        table.add_column(heading, justify="right")
    for heading in ("TP", "TP, heads copied"):
        table.add_column(heading)
    for row in rows:
        cache = row["kv_cache_bytes_per_token"]
        table.add_row(
            str(row["groups"]),
            row["attention"],
            size(row["tensor_bytes"]),
            size(cache),
            f"{cache / now:.1%}",
            " ".join(map(str, row["tensor_parallel_split"])),
            " ".join(map(str, row["tensor_parallel_replicated"])),
        )
    screen = console()
    screen.print(table)
    screen.print(
        "KV cache: of a token, all layers, 16 bits a value. TP: tensor-parallel sizes that divide the K/V heads; "
        "larger ones hold each on more than one device."
    )


def _latent_sizes(rows: list[dict[str, Any]], now: int) -> None:
    """Print a table of sizes of latent attention. `now`: bytes of the source's KV cache per token."""
    table = _table("\nSome sizes of latent attention (mha-to-mla)")
    for heading in ("--latent", "--rope", "KV cache", "of now", "as groups", "vLLM kernel"):
        table.add_column(heading, justify="right")
    for row in rows:
        cache = row["kv_cache_bytes_per_token"]
        kernel = "yes" if row["vllm_kernel"] else "no"
        groups = f"{row['as_groups']:.3g}"
        table.add_row(str(row["latent"]), str(row["rope"]), size(cache), f"{cache / now:.1%}", groups, kernel)
    screen = console()
    screen.print(table)
    screen.print(
        "as groups: the number of groups with the same KV cache. Tensor parallelism divides groups among devices, but "
        "copies the latent to each. transformers opens all sizes. vLLM kernel: whether it has a fast one, whose "
        "results were not verified."
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def print_plan(planned: dict[str, Any], done: bool = False) -> None:
    """Print a plan's summary, with estimates unless it is `done`."""
    cache = planned["kv_cache_bytes_per_token"]
    verb, verb_done = {"repeat": ("repeat", "repeated"), "latent": ("compute", "computed")}.get(
        planned["method"], ("merge", "merged")
    )
    steps = " and ".join(step for step in ("refit", "refine") if planned.get(step))
    method = f", method {planned['method']}{f' with {steps}' if steps else ''}" if planned["n_regrouped"] else ""
    print_key_values(
        f"{planned['source']} → {planned['out']}",
        [
            _attention(planned, method),
            *_tensors(verb_done if done else f"to {verb}", planned, "regrouped", " in the output"),
            *_tensors("copied" if done else "to copy", planned, "copied"),
            ("output", f"{size(planned['output_bytes'])} in {counted(planned['n_shards'], 'file')}"),
            ("KV cache per token", f"{size(cache['before'])} → {size(cache['after'])} (16 bit)"),
            *([] if done else [("peak memory, estimate", size(planned["peak_memory_bytes"]))]),
            *_calibration(planned, done),
            *_remarks(planned),
        ],
    )


def _tensors(label: str, planned: dict[str, Any], kind: str, where: str = "") -> list[tuple[str, str]]:
    n, n_bytes = planned[f"n_{kind}"], planned[f"bytes_{kind}"]
    return [(label, f"{counted(n, 'tensor')}, {size(n_bytes)}{where}")] if n else []


def _attention(planned: dict[str, Any], method: str) -> tuple[str, str]:
    if planned["method"] != "latent":
        return "K/V heads", f"{planned['n_kv_heads_in']} → {planned['groups']}{method}"
    sizes = planned["latent"]
    return "attention", f"{planned['n_kv_heads_in']} K/V heads → latent of {sizes['latent']} and key of {sizes['rope']}"


def _calibration(planned: dict[str, Any], done: bool) -> list[tuple[str, str]]:
    text = planned.get("calibration")
    if not text:
        return []
    n_tokens = text["windows"] * text["window"]
    time, room = duration(planned["calibration_seconds"]), size(planned["scratch_bytes"])
    work = f"{n_tokens:,} tokens on {planned['device']}"
    return [("calibration", work if done else f"{work}, estimate {time}, with {room} of temporary disk space")]


def _remarks(summary: dict[str, Any]) -> list[tuple[str, str]]:
    skipped_files = [("not copied", ", ".join(summary["left_out"]))] if summary["left_out"] else []
    return [*skipped_files, *(("note", note) for note in summary["notes"])]


def print_merge_report(report: list[dict[str, Any]]) -> None:
    """Print the merge report: cosines in groups and norm ratios, for K and V over all layers."""
    table = _table("Merged heads compared with the originals")
    table.add_column("", overflow="fold")
    for heading in ("cosine\nin groups", "lowest\n(layer)", "norm ÷\noriginal", "lowest\n(layer)"):
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
