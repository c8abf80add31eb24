"""Print the summary and the report of `convert inspect` as tables, with rich. `--json` prints JSON instead."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.inspection.heads import HeadReport, KeysValues, LayerHeads
from convert.inspection.summary import MLA, group_label
from convert.latent.sizes import DEEPSEEK_SIZES
from model.common.console import console, format_bytes, print_key_values, table_with_heading
from model.common.counts import counted
from model.common.printable import one_line

_MAX_ROWS = 4


def print_inspection(summary: dict[str, Any]) -> None:
    """Print the facts of a checkpoint, and tables of possible numbers of groups and sizes of latent attention."""
    dtypes = ", ".join(f"{dtype} {format_bytes(n)}" for dtype, n in summary["bytes_by_dtype"].items())
    print_key_values(
        summary["source"],
        [
            ("model_type", f"{summary['model_type']} ({summary['format']}, {counted(len(summary['files']), 'file')})"),
            *_attention(summary),
            ("layers", str(summary["n_layers"])),
            ("head size, hidden size", f"{summary['head_dim']}, {summary['hidden_size']}"),
            ("weights", f"{summary['n_tensors']} tensors, {dtypes}"),
            *(
                [("repeat-kv can make", f"{', '.join(map(str, summary['repeats']))} K/V heads")]
                if summary["repeats"]
                else []
            ),
            *([("not copied", ", ".join(map(one_line, summary["skipped_files"])))] if summary["skipped_files"] else []),
            *(("note", note) for note in summary["notes"]),
        ],
    )
    if summary["attention"] == MLA:
        return
    now = summary["groups"][0]["kv_cache_bytes_per_token"]
    _group_sizes(summary["groups"], now)
    if summary["latent"]:
        _latent_sizes(summary["latent"], now, is_float16="F16" in summary["bytes_by_dtype"])


def _attention(summary: dict[str, Any]) -> list[tuple[str, str]]:
    heads = f"{summary['attention']}: {summary['n_heads']} query heads"
    if summary["attention"] != MLA:
        return [("attention", f"{heads}, {summary['n_kv_heads']} K/V heads")]
    (latent,) = summary["latent"]
    cache = f"{format_bytes(latent['kv_cache_bytes_per_token'])} a token, as {latent['as_groups']:.3g} groups"
    return [
        ("attention", f"{heads}, a latent of {latent['latent']} and a rotated key of {latent['rope']} dimensions"),
        ("KV cache", f"{cache} (all layers, 16 bits a value)"),
    ]


def _group_sizes(rows: list[dict[str, Any]], now: int) -> None:
    """Print a table of the possible numbers of groups. `now`: bytes of the source's KV cache per token."""
    table = table_with_heading("\nPossible values of --groups")
    for heading in ("groups", "kind", "weights", "KV cache", "of now"):
        table.add_column(heading, justify="right")
    for heading in ("TP", "TP, heads copied"):
        table.add_column(heading)
    for row in rows:
        cache = row["kv_cache_bytes_per_token"]
        table.add_row(
            str(row["groups"]),
            row["attention"],
            format_bytes(row["tensor_bytes"]),
            format_bytes(cache),
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


def _latent_sizes(rows: list[dict[str, Any]], now: int, is_float16: bool) -> None:
    """Print a table of sizes of latent attention. `now`: bytes of the source's KV cache per token."""
    table = table_with_heading("\nSome sizes of latent attention (mha-to-mla)")
    for heading in ("--latent", "--rope", "KV cache", "of now", "as groups", "vLLM kernel"):
        table.add_column(heading, justify="right")
    for row in rows:
        cache = row["kv_cache_bytes_per_token"]
        is_everywhere = (row["latent"], row["rope"]) == DEEPSEEK_SIZES
        kernel = ("yes" if is_everywhere else "on some GPUs") if row["vllm_kernel"] else "no"
        groups = f"{row['as_groups']:.3g}"
        table.add_row(str(row["latent"]), str(row["rope"]), format_bytes(cache), f"{cache / now:.1%}", groups, kernel)
    screen = console()
    screen.print(table)
    screen.print(
        "as groups: the number of groups with the same KV cache. Tensor parallelism divides groups among devices, but "
        "copies the latent to each. transformers opens all sizes. vLLM kernel: whether it has a fast one, whose "
        "results were not verified."
        + " The weights are float16: add --dtype bfloat16, or --latent-norm bias."
        * is_float16
    )


def print_heads(report: HeadReport) -> None:
    """Print one row per layer, means over the layers, and a legend. The table fits 80 columns."""
    shown = shown_groups(report.n_kv_heads, report.groups)
    table = table_with_heading("\nSimilarity of K/V heads, and loss from merging them", padding=0)
    for heading in ("layer", "K cos\nraw", "K cos\naligned", "V cos\nraw", "V cos\naligned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for groups in shown:
        table.add_column(f"{group_label(groups)} %\nK, V lost", justify="right", no_wrap=True)
    for layer in report.layers:
        table.add_row(str(layer.layer), *_cosines([layer]), *_losses([layer], "pca", shown))
    table.add_section()
    table.add_row("mean", *_cosines(report.layers), *_losses(report.layers, "pca", shown))
    table.add_row("mean *", *[""] * 4, *_losses(report.layers, "mean", shown))
    screen = console()
    screen.print(table)
    worst = ", ".join(str(layer.layer) for layer in report.worst[:3])
    for line in ("", *_LEGEND, f"\nLayers with the largest loss: {worst}."):
        screen.print(line, highlight=False)


_LEGEND = (
    "cos: cosine of two heads, mean over all pairs. aligned: after the best rotation of each head that keeps the "
    "model's output.",
    "% K, V lost: share of the energy of logits (K) and output (V) that is lost when neighbouring heads share one, "
    "with --method pca. mean *: with --method mean. Computed from the weights alone, without text.",
)


def shown_groups(n_kv_heads: int, groups: tuple[int, ...]) -> list[int]:
    """Return the numbers of groups to show: successive halves of the K/V heads and 1 first, then others, up to four."""
    preferred = [n for n in groups if n * 2 == n_kv_heads or n * 4 == n_kv_heads or n * 8 == n_kv_heads or n == 1]
    remaining = [n for n in groups if n not in preferred]
    return sorted([*preferred, *remaining][:_MAX_ROWS], reverse=True)


def _cosines(layers: Sequence[LayerHeads]) -> list[str]:
    raw, aligned = _mean([layer.raw for layer in layers]), _mean([layer.aligned for layer in layers])
    return [f"{round(number, 3) + 0.0:.3f}" for number in (raw.k, aligned.k, raw.v, aligned.v)]


def _losses(layers: Sequence[LayerHeads], method: str, shown: list[int]) -> list[str]:
    means = (_mean([layer.lost[method][groups] for layer in layers]) for groups in shown)
    return [f"{_percent(lost.k):>5} {_percent(lost.v):>4}" for lost in means]


def _percent(share: float) -> str:
    percent = f"{share:.1%}".removesuffix("%")
    return percent if len(percent) <= 4 else f"{share:.0%}".removesuffix("%")


def _mean(numbers: list[KeysValues]) -> KeysValues:
    return KeysValues(float(np.mean([n.k for n in numbers])), float(np.mean([n.v for n in numbers])))
