"""Print the report of `convert inspect --heads` as a table."""

from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from convert.inspection.heads import HeadReport, KeysValues, LayerHeads
from convert.inspection.summary import group_label
from model.common.console import console

_MOST_SHOWN = 4


def print_heads(report: HeadReport) -> None:
    """Print one row per layer, means over the layers, and a legend. The table fits 80 columns."""
    shown = shown_groups(report.n_kv_heads, report.groups)
    table = Table(
        title="\nSimilarity of K/V heads, and loss from merging them",
        title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0,
    )  # fmt: skip
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
    return sorted([*preferred, *remaining][:_MOST_SHOWN], reverse=True)


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
