"""What the studies found, drawn from the recorded results.

headline.png: above, what each merge leaves of the loss that merging by the mean costs; below, loss against tokens of
uptraining. speed.png: loss against the time to decode, as in figure 3 of Ainslie et al. (2023).
Colours are Okabe and Ito's, which the colour-blind can tell apart; each series has a marker of its own.
"""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from results import Line, Seeds, at, at_best_setting, losses, read, shares, trained

HEADLINE, SPEED = "headline.png", "speed.png"
SOURCES = {
    HEADLINE: ("merges.jsonl", "longer.jsonl", "smollm2.jsonl", "paper.jsonl", "recipe.jsonl", "short.jsonl"),
    SPEED: ("short.jsonl", "../bench/decode_study.json"),
}
"""What each figure is drawn from."""
INK, MUTED, GRID = "#1c1c1e", "#6e6e73", "#d9d9de"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "axes.labelcolor": INK,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6, "text.color": INK,
    "legend.frameon": False, "legend.fontsize": 8, "font.sans-serif": ["DejaVu Sans"],
}  # fmt: skip
MERGES = {
    "random": "random", "mean": "mean (the paper's)", "first": "first", "mean-norm": "mean, norm restored",
    "aligned-spread": "aligned, mean", "pca-spread": "pca", "fit-spread": "fit", "fit-refit": "fit --refit (default)",
}  # fmt: skip
PLACES = (
    ("merges", 2, "8 → 2", BLUE, BLUE, "o"), ("longer", 2, "8 → 2, better-trained parents", BLUE, "white", "o"),
    ("merges", 1, "8 → 1", ORANGE, ORANGE, "s"), ("longer", 1, "8 → 1, better-trained parents", ORANGE, "white", "s"),
    ("smollm2", 1, "SmolLM2 3 → 1", GREEN, GREEN, "^"),
)  # fmt: skip
CURVES = (
    ("mean", "next-token", "mean, next token: the paper's recipe", ORANGE, "s"),
    ("mean", "distill", "mean, distilled from the parent", PINK, "v"),
    ("fit-refit", "distill", "the default merge, distilled", BLUE, "o"),
    ("parent", "next-token", "the parent itself, trained on", MUTED, "d"),
)
NAMES = {8: "MHA", 4: "GQA-4", 2: "GQA-2", 1: "MQA"}
NEXT_TO: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 8, "color": MUTED}


def draw(results: Path) -> None:
    """Write the figures beside the results."""
    with matplotlib.rc_context(STYLE):
        for name, figure in ((HEADLINE, headline(results)), (SPEED, speed(results))):
            figure.savefig(results / name, metadata={"Software": None, "Source": digest(results, name)})


def digest(results: Path, figure: str) -> str:
    """Return what tells whether a figure is of these results, drawn so."""
    sources = [Path(__file__), *(results / source for source in SOURCES[figure])]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def headline(results: Path) -> Figure:
    figure = Figure(figsize=(8.2, 6.2), dpi=150, layout="constrained")
    grid, lines = figure.add_gridspec(2, 2), trained(results)
    draw_merges(
        figure.add_subplot(grid[0, :]),
        {plan: read(results / f"{plan}.jsonl") for plan in ("merges", "longer", "smollm2")},
    )
    left = figure.add_subplot(grid[1, 0])
    draw_uptraining(left, lines, 2)
    draw_uptraining(figure.add_subplot(grid[1, 1], sharey=left), lines, 1)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def speed(results: Path) -> Figure:
    """Draw the loss after a short uptraining against the time to decode, a point for each number of K/V heads."""
    rows = json.loads((results / "../bench/decode_study.json").read_text())["rows"]
    batch, context = max((row["batch"], row["context"]) for row in rows)
    times = {row["n_kv_heads"]: row for row in rows if (row["batch"], row["context"]) == (batch, context)}
    lines = read(results / "short.jsonl")
    parent = statistics.mean(losses(at(lines, "parent", (0, None))).values())
    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for arm, loss, label, colour, marker in CURVES[:3]:
        found = {heads: list(losses(at(lines, arm, (0.01, loss), heads)).values()) for heads in (4, 2, 1)}
        axes.errorbar(
            [milliseconds(times[heads]) for heads in found], [statistics.mean(x) for x in found.values()],
            [statistics.stdev(x) for x in found.values()], fmt=f"{marker}-", color=colour, label=label, capsize=2,
            markersize=5, elinewidth=1,
        )  # fmt: skip
        for heads, values in found.items():
            axes.annotate(NAMES[heads], (milliseconds(times[heads]), statistics.mean(values)), **NEXT_TO)
    axes.plot([milliseconds(times[8])], [parent], "d", color=MUTED, label="the parent")
    axes.annotate(NAMES[8], (milliseconds(times[8]), parent), **NEXT_TO)
    axes.set_title(f"Loss after uptraining for 1 %, and time to decode (batch {batch}, context {context})")
    axes.set_xlabel("milliseconds per step")
    axes.set_ylabel("nats per token")
    axes.set_xlim(left=0, right=1.15 * milliseconds(times[8]))
    axes.legend(loc="center left")
    return figure


def milliseconds(row: dict[str, Any]) -> float:
    return 1e3 * float(row["ours_s"])


def draw_merges(axes: Axes, results: dict[str, list[Line]]) -> None:
    axes.set_title("Right after conversion: what is left of the loss that merging by the mean costs")
    for place, (plan, groups, label, colour, inside, marker) in enumerate(PLACES):
        lines = [line for line in results[plan] if line["groups"] == groups]
        for row, arm in enumerate(MERGES):
            own = [line for line in lines if line["arm"] == arm and not line["alpha"]]
            if figures := list(shares(own, lines).values()):
                error = statistics.stdev(figures) * 100 if len(figures) > 1 else 0
                axes.errorbar(
                    statistics.mean(figures) * 100, row + (place - 2) * 0.16, xerr=error, fmt=marker, color=colour,
                    markerfacecolor=inside, markersize=5, capsize=2, elinewidth=1,
                    label=label if arm == "mean" else None,
                )  # fmt: skip
    axes.set_yticks(range(len(MERGES)), MERGES.values())
    axes.set_xlim(left=0)
    axes.set_xlabel("% of mean's gap that is left")
    axes.legend(loc="upper right", title="K/V heads", alignment="left", title_fontsize=8)


def draw_uptraining(axes: Axes, lines: list[Line], groups: int) -> None:
    """Draw what each way of uptraining comes to, at the best of the settings tried for it."""
    axes.set_title(f"8 → {groups}: held-out loss against uptraining")
    for arm, loss, label, colour, marker in CURVES:
        points = curve([line for line in lines if line["arm"] == arm and line["groups"] in (groups, 8)], loss)
        if points:
            values = [list(seeds.values()) for seeds in points.values()]
            spread = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
            means = [statistics.mean(v) for v in values]
            axes.errorbar(
                [100 * alpha for alpha in points], means, spread, fmt=f"{marker}-", color=colour, label=label,
                markersize=5, capsize=2, elinewidth=1,
            )  # fmt: skip
    axes.set_xlabel("tokens, % of the parent's pre-training")
    axes.set_ylabel("nats per token")
    axes.set_xscale("symlog", linthresh=0.25, linscale=0.5)
    axes.set_xticks([0, 0.25, 0.5, 1, 2, 5, 10], ["0", "¼", "½", "1", "2", "5", "10"], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())


def curve(lines: list[Line], loss: str) -> dict[float, Seeds]:
    """Return the losses by share of uptraining, from none on."""
    alphas = sorted({line["alpha"] for line in lines if line["loss"] in (None, loss)})
    own = {alpha: [x for x in lines if x["alpha"] == alpha and x["loss"] in (None, loss)] for alpha in alphas}
    return {alpha: losses(at_best_setting(found)) for alpha, found in own.items()}
