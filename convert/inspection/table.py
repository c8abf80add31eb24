"""Print the report of `convert inspect --heads` as a table."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from convert.inspection.heads import HeadReport, KeysValues, LayerHeads
from convert.inspection.summary import attention_kind
from model.common.console import console

_MOST_SHOWN = 4
_WIDTH = 110


def print_heads(report: HeadReport) -> None:
    """Print one row per layer, means over the layers, and a legend."""
    shown = shown_groups(report.n_kv_heads, report.groups)
    table = Table(title="\nHow alike K/V heads are, and what merging them loses", title_justify="left")
    for heading in ("layer", "K cosine\nraw", "K cosine\naligned", "V cosine\nraw", "V cosine\naligned"):
        table.add_column(heading, justify="right")
    for groups in shown:
        table.add_column(f"{attention_kind(0, groups)}: %\nlost K, V", justify="right")
    for layer in report.layers:
        table.add_row(str(layer.layer), *_cosines([layer]), *_losses([layer], "pca", shown))
    table.add_section()
    table.add_row("mean", *_cosines(report.layers), *_losses(report.layers, "pca", shown))
    table.add_row("mean *", *[""] * 4, *_losses(report.layers, "mean", shown))
    screen = console()
    if not screen.is_terminal:  # a file has no need to fold lines at 80 columns
        screen.width = max(screen.width, _WIDTH)
    screen.print(table)
    worst = ", ".join(str(layer.layer) for layer in report.worst[:3])
    for line in (*_LEGEND, f"\nLayers that lose most: {worst}."):
        screen.print(line, highlight=False)


_LEGEND = (
    "Cosines: of two heads, mean of all pairs; aligned: after the best turns that leave the model as it is.",
    "Lost: share of the energy of logits (K) and output (V) that is gone when neighbours share a head, by --method "
    "pca; *: by --method mean. From the weights alone; no text was run.",
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
    return [f"{_percent(lost.k)}, {_percent(lost.v):>4}" for lost in means]


def _percent(share: float) -> str:
    percent = f"{share:.1%}".removesuffix("%")
    return percent if len(percent) <= 4 else f"{share:.0%}".removesuffix("%")


def _mean(numbers: list[KeysValues]) -> KeysValues:
    return KeysValues(float(np.mean([n.k for n in numbers])), float(np.mean([n.v for n in numbers])))
