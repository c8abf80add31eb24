"""Draw the figures of the study from the recorded results.

headline.png: above, the loss that each merge adds, as a share of what the mean adds; below, loss against tokens of
uptraining, of the parents on seven tokens per parameter. weak.png: the same of the weak ones. compute.png: loss against
compute, of both. speed.png: loss against the time to decode, as in figure 3 of Ainslie et al. (2023). rates.png: loss
against the peak of the learning rate. parts.png: the same by the part that is trained. tokens.png: SmolLM2's loss
against tokens, by the part that is trained.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import NullFormatter, NullLocator

from model.common import plot_style
from model.common.plot_style import INK, MUTED, PAGE, PLOT_STYLE, SERIES
from scripts.study.results import (
    ARM_REFITTED_ONCE,
    BETTER,
    DEFAULT_ARM,
    WEAK,
    Result,
    Seeds,
    at,
    at_best_setting,
    distilled_mean,
    forward_passes,
    gaps,
    read_results,
    shares_of_mean_gap,
    united,
)

HEADLINE_FIGURE, WEAK_ONES, SPEED, RATES_FIGURE = "headline.png", "weak.png", "speed.png", "rates.png"
COMPUTE, PARTS, TOKENS = "compute.png", "parts.png", "tokens.png"
SOURCES = {
    HEADLINE_FIGURE: (
        "merges.jsonl",
        "smollm2.jsonl",
        "refine.jsonl",
        "refine_longer.jsonl",
        "behaviour.jsonl",
        "twenty.jsonl",
        *(f"{plan}.jsonl" for plan in BETTER),
    ),
    WEAK_ONES: tuple(f"{plan}.jsonl" for plan in (*WEAK, "parts")),
    SPEED: (*(f"{plan}.jsonl" for plan in BETTER), "../bench/decode_study.json"),
    RATES_FIGURE: ("rates.jsonl",),
    COMPUTE: tuple(f"{plan}.jsonl" for plan in (*WEAK, *BETTER, "refine", "refine_longer", "parts", "behaviour")),
    PARTS: ("parts.jsonl",),
    TOKENS: ("smollm2_tokens.jsonl",),
}
"""What each figure is drawn from."""
FIGURE_STYLE = PLOT_STYLE | {
    "axes.labelcolor": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "legend.handlelength": 3.5,
}  # fmt: skip
"""These figures are read in print too: dark labels, and legends that show the dashes of lines."""
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = SERIES
ROW = "#f2f2f0"
"""Every second row of merges has this background, so that each point is seen to be of one row."""
PURPLE, LIGHT_PURPLE, BROWN, LIGHT_BROWN = "#5e3c99", "#b2abd2", "#8c510a", "#dfc27d"
LONG_DASHES: Any = (0, (6, 1, 1, 1, 1, 1))
DEFAULT, UNREFINED = "default", "unrefined"
MERGES = {
    "random": ("random",), "mean (the paper's)": ("mean",), "first": ("first",),
    "aligned, better of two": ("aligned-spread", "aligned-weights"),
    "pca, better of two": ("pca-spread", "pca-weights"),
    "fit": ("fit-spread",), "default, unrefined": (UNREFINED,), "default": (DEFAULT,),
}  # fmt: skip
"""Name of a merge → its arms, of which the best on average is drawn: calibrated on a text, or by the weights alone."""


class Style(NamedTuple):
    """How a curve, or a row of points, is drawn."""

    colour: str
    marker: str
    line: Any = "-"
    """Dashes, as matplotlib's `linestyle`."""
    inside: str = ""
    """Colour of the inside of markers; empty: that of the curve."""


class MergePoints(NamedTuple):
    """The points of one plan and number of K/V heads in the figure of merges."""

    plan: str
    groups: int
    label: str
    style: Style


class Curve(NamedTuple):
    """An arm, uptrained with a loss."""

    arm: str
    loss: str
    label: str
    style: Style

    def of(self, lines: list[Result]) -> list[Result]:
        """Return the lines of this arm and loss."""
        return [line for line in lines if (line["arm"], line["loss"]) == (self.arm, self.loss)]


MERGE_POINTS = (
    MergePoints("merges", 2, "8 → 2, 1 token per parameter", Style(PURPLE, "h", inside=PAGE)),
    MergePoints("longer", 2, "8 → 2, 7 tokens per parameter", Style(PURPLE, "h", inside=LIGHT_PURPLE)),
    MergePoints("twenty", 2, "8 → 2, 20 tokens per parameter", Style(PURPLE, "h")),
    MergePoints("merges", 1, "8 → 1, 1 token per parameter", Style(BROWN, ">", inside=PAGE)),
    MergePoints("longer", 1, "8 → 1, 7 tokens per parameter", Style(BROWN, ">", inside=LIGHT_BROWN)),
    MergePoints("twenty", 1, "8 → 1, 20 tokens per parameter", Style(BROWN, ">")),
    MergePoints("smollm2", 1, "SmolLM2 3 → 1", Style(INK, "*")),
)
PLANS_WITH_DEFAULT = {"merges": "refine", "longer": "refine_longer", "smollm2": "behaviour"}
"""The plans that have the default merge. All other merges were calibrated on less text, of one kind."""
UNREFINED_ARMS = {"behaviour": "not refined"}
"""Plan → its name of the unrefined default, where it is not `unrefined`."""
RECIPE = Curve("mean", "next-token", "mean, next token (α = 0.05: the paper's recipe)", Style(ORANGE, "s"))
DISTILLED_MEAN = Curve("mean", "distill", "mean, distilled from the parent", Style(PINK, "v", "--"))
FORMER_DEFAULT_CURVE = Curve("fit-refit", "distill", "former default, distilled", Style(BLUE, "o", ":"))
CONTROL = Curve("parent", "next-token", "the control: the parent, trained further", Style(MUTED, "d", "-."))
DISTILLED_DEFAULT = Curve(
    ARM_REFITTED_ONCE["refine_longer"], "distill", "default, distilled: attention", Style(GREEN, "^", ":")
)
DEFAULT_BY_TOKENS = ("unrefined", "refined 65536", "refined 262144")
DEFAULT_ARMS = (DEFAULT, "refined 65536")
"""Names of the default merge in the plans that distil it."""
MERGE_SHARES = (1, 2, 5, 10, 20, 50, 100, 200)
"""Ticks: share of mean's gap, in %."""
SHARES, GAPS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2), (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Ticks: compute as a share of the recipe's, and nats."""
RATES_TRIED = (6e-5, 2e-4, 4e-4, 6.6e-4, 1e-3, 2e-3)
PARTS_RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
"""Ticks: peaks of the learning rate."""
TOP = 0.55
BEYOND = "loss above the parent's (nats)"
NOT_IN_LEGEND = "_"
"""A label that matplotlib leaves out of legends."""
SCRATCH = "trained with 2 K/V heads from the start"
DPI = 200
TRAINED_PARTS = {
    "all": Style(ORANGE, "s"), "attention": Style(BLUE, "o", "--"), "kv": Style(GREEN, "^", "-."),
    "lora": Style(PINK, "v", ":"),
}  # fmt: skip
PART_NAMES = {"all": "all parameters", "attention": "attention", "kv": "keys and values", "lora": "adapters"}
TRAINED_FROM = {DEFAULT: "from the default", "mean": "from the mean"}
SCHEDULES = {"wsd": Style(BLUE, "o"), "cosine": Style(ORANGE, "s", "--"), "constant": Style(GREEN, "^", ":")}
TOKENS_TRIED = (20, 50, 100, 200, 500, 1000)
"""Ticks: thousands of tokens."""
NAMES = {8: "MHA", 4: "GQA-4", 2: "GQA-2", 1: "MQA"}
NEXT_TO: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 8, "color": INK}
LEFT_OF = {**NEXT_TO, "xytext": (-5, -10), "horizontalalignment": "right"}


def draw(results: Path) -> None:
    """Write the figures beside the results."""
    drawn = {
        HEADLINE_FIGURE: headline, WEAK_ONES: weak, SPEED: speed, RATES_FIGURE: rates, COMPUTE: compute, PARTS: parts,
        TOKENS: tokens,
    }  # fmt: skip
    with matplotlib.rc_context(FIGURE_STYLE):
        for name, figure_of in drawn.items():
            figure_of(results).savefig(
                results / name, dpi=DPI, metadata={"Software": None, "Source": digest(results, name)}
            )


def digest(results: Path, figure: str) -> str:
    """Return a hash of a figure's results and of the code that draws it."""
    sources = [Path(__file__), Path(plot_style.__file__), *(results / source for source in SOURCES[figure])]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def headline(results: Path) -> Figure:
    figure = Figure(figsize=(8.2, 7.2), layout="constrained")
    (above,), (below,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.05))
    names = {*(points.plan for points in MERGE_POINTS), *PLANS_WITH_DEFAULT.values()}
    plans = {name: read_results(results / f"{name}.jsonl") for name in names}
    draw_merges(above.subplots(), plans)
    left, right = below.subplots(1, 2, sharey=True)
    earlier = [line for line in united(results, BETTER) if line["arm"] != FORMER_DEFAULT_CURVE.arm]
    lines = [*earlier, *distilled_mean(results), *read_results(results / "refine_longer.jsonl")]
    draw_both(below, left, right, lines, "7 tokens per parameter")
    return figure


def weak(results: Path) -> Figure:
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    lines = [line for line in weak_lines(results) if not is_at_a_bad_rate(line)]
    draw_both(figure, left, right, lines, "1 token per parameter")
    return figure


def weak_lines(results: Path) -> list[Result]:
    """Return the uptraining of the weak parents, with the mean distilled at other rates, or attention alone."""
    parts = [line for line in read_results(results / "parts.jsonl") if line["arm"] == "mean" and line["alpha"]]
    return [*united(results, WEAK), *parts]


def of_one_part(lines: list[Result]) -> list[Result]:
    """Return the lines without the distilled mean of all parameters if attention alone was tried too.

    All parameters were tried at one, lower rate, which is worse where both were tried.
    """
    mean = DISTILLED_MEAN.of(lines)
    if "attention" not in {line["trainable"] for line in mean}:
        return lines
    return [line for line in lines if line not in mean or line["trainable"] == "attention"]


def is_at_a_bad_rate(line: Result) -> bool:
    """Return whether a line is of the control where only a rate was tried that is too high for it."""
    return (line["arm"], line["alpha"]) == (CONTROL.arm, 0.01)


def draw_both(figure: FigureBase, left: Axes, right: Axes, lines: list[Result], parents: str) -> None:
    """Draw the uptraining to two K/V heads and to one; the titles name the parents."""
    for axes, groups in ((left, 2), (right, 1)):
        draw_uptraining(axes, lines, groups)
        axes.set_title(f"8 → {groups}, {parents}")
    figure.legend(*legend_of(left), loc="outside lower center", ncols=2)


def legend_of(axes: Axes) -> tuple[list[Any], list[str]]:
    """Return the entries of a legend, without error bars, which not all points have."""
    handles, labels = axes.get_legend_handles_labels()
    plain = [handle[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles]
    return plain, list(labels)


def speed(results: Path) -> Figure:
    """Draw the loss after the paper's α against the time to decode, a point for each number of K/V heads."""
    rows = json.loads((results / "../bench/decode_study.json").read_text())["rows"]
    batch, context = max((row["batch"], row["context"]) for row in rows)
    times = {row["n_kv_heads"]: milliseconds(row) for row in rows if (row["batch"], row["context"]) == (batch, context)}
    lines = united(results, BETTER)
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for curve in (RECIPE, DISTILLED_MEAN, FORMER_DEFAULT_CURVE):
        by_heads = {heads: gaps(at(lines, curve.arm, (0.05, curve.loss), heads)) for heads in (4, 2, 1)}
        points = {heads: seeds for heads, seeds in by_heads.items() if seeds}
        draw_points(axes, {times[heads]: seeds for heads, seeds in points.items()}, curve.label, curve.style)
        for heads, seeds in points.items():
            beside = LEFT_OF if heads == 1 else NEXT_TO  # no curve goes on to the left of MQA
            axes.annotate(NAMES[heads], (times[heads], statistics.mean(seeds.values())), **beside)
    axes.plot([times[8]], [0], "d", color=MUTED, label="the parent")
    axes.annotate(NAMES[8], (times[8], 0), **NEXT_TO)
    axes.set_title("Loss after uptraining for α = 0.05, and time to decode")
    axes.set_xlabel(f"milliseconds per decoding step (batch {batch}, context {context})")
    axes.set_ylabel(BEYOND)
    axes.set_xlim(left=0, right=1.15 * times[8])
    figure.legend(*legend_of(axes), loc="outside lower center", ncols=2)
    return figure


def rates(results: Path) -> Figure:
    """Draw the final loss for each peak rate and schedule, of the former default and of the mean."""
    lines = read_results(results / "rates.jsonl")
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    panels = ((FORMER_DEFAULT_CURVE, FORMER_DEFAULT_CURVE.label), (RECIPE, "mean, next token"))
    for axes, (curve, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for schedule, style in SCHEDULES.items():
            own = [line for line in curve.of(lines) if line["schedule"] == schedule]
            draw_points(axes, gaps_by_rate(own), schedule, style)
        axes.set_title(title)
        label_rates(axes, RATES_TRIED)
        axes.legend(*legend_of(axes))
    return figure


def compute(results: Path) -> Figure:
    """Draw the loss of each way from the parent to fewer heads against its compute: a row of panels for each kind."""
    better = [*united(results, BETTER), *distilled_mean(results), *read_results(results / "refine_longer.jsonl")]
    weak = [*weak_lines(results), *read_results(results / "refine.jsonl")]
    weak += [line for line in read_results(results / "parts.jsonl") if line["arm"] == DEFAULT and line["alpha"]]
    kinds = [("weak", weak), ("better-trained", better)]
    figure = Figure(figsize=(8.2, 6.6), layout="constrained")
    rows = figure.subplots(2, 2, sharex=True, sharey="row")
    for (name, lines), panels in zip(kinds, rows, strict=True):
        for axes, groups in zip(panels, (2, 1), strict=True):
            draw_compute(axes, [line for line in lines if line["groups"] == groups])
            axes.set_title(f"8 → {groups}, {name} parents")
        panels[0].set_ylabel(BEYOND)
    for axes in rows[-1]:
        axes.set_xlabel("compute, as a share of the paper's recipe")
    figure.legend(*legend_of(rows[0][0]), loc="outside lower center", ncols=2)
    return figure


def draw_compute(axes: Axes, lines: list[Result]) -> None:
    """Draw the gap to the parent against compute, for each way of converting and uptraining."""
    lines = of_one_part(lines)
    of_recipe = forward_passes(at(lines, RECIPE.arm, (0.05, RECIPE.loss))[0])
    ways = [(curve.label, curve.of(lines), curve.style) for curve in (RECIPE, DISTILLED_MEAN)]
    default = [line for line in lines if line["arm"] in DEFAULT_BY_TOKENS and not line["alpha"]]
    ways.append(("default, refined on 0, 65,536 and 262,144 tokens", default, Style(SKY, "P", "-.")))
    distilled = [line for line in lines if line["arm"] in DEFAULT_ARMS and line["loss"] == "distill"]
    for part, style in (("all", Style(YELLOW, "X", LONG_DASHES)), ("attention", DISTILLED_DEFAULT.style)):
        own = [line for line in distilled if line["trainable"] == part]
        ways.append((f"default, distilled: {PART_NAMES[part]}", own, style))
    for label, of_way, style in ways:
        points = {}
        # Batches give a few tokens more or less, because steps are whole; they share a point.
        for share in sorted({round(forward_passes(line) / of_recipe, 2) for line in of_way}):
            best = at_best_setting([line for line in of_way if round(forward_passes(line) / of_recipe, 2) == share])
            points[forward_passes(best[0]) / of_recipe] = gaps(best)
        if points:
            draw_points(axes, points, label, style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(SHARES, [f"{share:g}" for share in SHARES])
    axes.set_yticks(GAPS, [f"{gap:g}" for gap in GAPS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def parts(results: Path) -> Figure:
    """Draw the final loss for each peak rate on the first parent, by the part that is trained."""
    lines = [line for line in read_results(results / "parts.jsonl") if line["seed"] == 0]
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    for axes, (arm, title) in zip(figure.subplots(1, 2), TRAINED_FROM.items(), strict=True):
        of_arm = [line for line in lines if line["arm"] == arm]
        for part, style in TRAINED_PARTS.items():
            for alpha, inside in ((0.0025, PAGE), (0.01, style.colour)):
                own = [line for line in of_arm if (line["trainable"], line["alpha"]) == (part, alpha)]
                label = f"{PART_NAMES[part]}, α {alpha:g}"
                draw_points(axes, gaps_by_rate(own), label, style._replace(inside=inside))
        start = statistics.mean(gaps([line for line in of_arm if not line["alpha"]]).values())
        if arm == DEFAULT:
            axes.axhline(start, color=INK, linewidth=1, label="after conversion")
        axes.set_title(title)
        label_rates(axes, [rate for rate in PARTS_RATES if rate in {line["lr"] for line in of_arm}])
    figure.legend(*legend_of(figure.axes[0]), loc="outside lower center", ncols=3)
    return figure


def tokens(results: Path) -> Figure:
    """Draw the loss of SmolLM2 against tokens of distillation, each part at the best of its rates."""
    lines = [line for line in read_results(results / "smollm2_tokens.jsonl") if line["arm"] == DEFAULT]
    (start,) = gaps([line for line in lines if not line["alpha"]]).values()
    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(start, color=INK, linewidth=1, label="after conversion")
    for part, style in TRAINED_PARTS.items():
        own = [line for line in lines if line["trainable"] == part]
        lengths = sorted({line["tokens"] for line in own})
        points = {n / 1000: gaps(at_best_setting([x for x in own if x["tokens"] == n])) for n in lengths}
        draw_points(axes, points, PART_NAMES[part], style)
    axes.set_xlabel("tokens of distillation (thousands)")
    axes.set_ylabel(BEYOND)
    axes.set_xscale("log")
    axes.set_xticks(TOKENS_TRIED, [f"{n:,}" for n in TOKENS_TRIED])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.legend(*legend_of(axes), loc="lower left")
    return figure


def label_rates(axes: Axes, ticks: Sequence[float]) -> None:
    """Label the axes of losses against the peak of the learning rate, with a tick for each rate."""
    axes.set_xlabel("peak of the learning rate (10⁻⁴)")
    axes.set_ylabel(BEYOND)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{rate * 1e4:g}" for rate in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def gaps_by_rate(lines: list[Result]) -> dict[float, Seeds]:
    """Return the gaps to the parent by the peak of the learning rate."""
    rates = sorted({line["lr"] for line in lines})
    return {rate: gaps([line for line in lines if line["lr"] == rate]) for rate in rates}


def draw_points(axes: Axes, points: dict[float, Seeds], label: str, style: Style) -> None:
    """Draw means over seeds, with their spread if there are several."""
    values = [list(seeds.values()) for seeds in points.values()]
    spread = [statistics.stdev(v) if len(v) > 1 else math.nan for v in values]
    axes.errorbar(
        list(points), [statistics.mean(v) for v in values], spread, marker=style.marker, linestyle=style.line,
        color=style.colour, markerfacecolor=style.inside or style.colour, label=label, markersize=5, capsize=2,
        elinewidth=1,
    )  # fmt: skip


def milliseconds(row: dict[str, Any]) -> float:
    return 1e3 * float(row["ours_s"])


def draw_merges(axes: Axes, results: dict[str, list[Result]]) -> None:
    axes.set_title("Right after conversion: added loss, in % of the loss that the mean adds")
    for number, (plan, groups, label, style) in enumerate(MERGE_POINTS):
        offset = (number - len(MERGE_POINTS) // 2) * 0.1  # so that the points of a row do not hide each other
        for row, arms in enumerate(MERGES.values()):
            variants = [figures for arm in arms if (figures := shares_of_seeds(results, plan, arm, groups))]
            if variants:
                figures = min(variants, key=statistics.mean)
                # Of two parents, both are drawn.
                drawn = figures if len(figures) == 2 else [statistics.mean(figures)]
                error = statistics.stdev(figures) * 100 if len(figures) > 2 else math.nan
                axes.errorbar(
                    [100 * share for share in drawn], [row + offset] * len(drawn), xerr=error, fmt=style.marker,
                    color=style.colour, markerfacecolor=style.inside or style.colour, markersize=6, capsize=2,
                    elinewidth=1, linestyle="none", label=label if arms == ("mean",) else None,
                )  # fmt: skip
    axes.set_yticks(range(len(MERGES)), MERGES)
    axes.set_ylim(-0.5, len(MERGES) - 0.5)
    axes.grid(visible=False, axis="y")
    for row in range(0, len(MERGES), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=ROW, linewidth=0, zorder=0)
    axes.set_xscale("log")
    axes.set_xticks(MERGE_SHARES, map(str, MERGE_SHARES))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("added loss, % of the mean's (logarithmic)")
    axes.legend(
        *legend_of(axes), title="K/V heads; parents", alignment="left", title_fontsize=8, loc="upper left",
        bbox_to_anchor=(1.01, 1),
    )  # fmt: skip


def shares_of_seeds(results: dict[str, list[Result]], plan: str, arm: str, groups: int) -> list[float]:
    """Return an arm's shares of mean's gap right after conversion, for each seed."""
    external = plan if plan == "smollm2" else None
    if arm in (DEFAULT, UNREFINED):
        plan = PLANS_WITH_DEFAULT.get(plan, plan)
        arm = (DEFAULT_ARM if arm == DEFAULT else UNREFINED_ARMS).get(plan, arm)
    lines = [line for line in results[plan] if line["groups"] == groups and external in (None, line["parent"])]
    own = [line for line in lines if line["arm"] == arm and not line["alpha"]]
    return list(shares_of_mean_gap(own, lines).values())


def draw_uptraining(axes: Axes, lines: list[Result], groups: int) -> None:
    """Draw the loss after each way of uptraining, at the best of the settings tried for it."""
    own = of_one_part([line for line in lines if line["groups"] in (groups, 8)])
    for curve in (RECIPE, DISTILLED_MEAN, FORMER_DEFAULT_CURVE, CONTROL, DISTILLED_DEFAULT):
        if points := gaps_by_alpha([line for line in own if line["arm"] == curve.arm], curve.loss):
            percent = {100 * alpha: seeds for alpha, seeds in points.items() if alpha}
            draw_points(axes, percent, curve.label, curve.style)
            # Between no training and the shortest, nothing was measured: no line connects them.
            before = {alpha: seeds for alpha, seeds in points.items() if not alpha}
            draw_points(axes, before, NOT_IN_LEGEND, curve.style)
    scratch = [line for line in lines if line["from_scratch"] and line["groups"] == groups]
    if scratch:
        axes.axhline(statistics.mean(gaps(scratch).values()), color=INK, linewidth=1, label=SCRATCH)
    start = statistics.mean(gaps(at(lines, "mean", (0, None), groups)).values())
    axes.annotate(f"mean:\n{start:.2f} ↑", (0, TOP), **{**NEXT_TO, "xytext": (-4, -20)})
    axes.set_ylim(-0.03, TOP)  # where the mean begins is far above what matters
    axes.set_xlim(-0.06, 12)
    axes.set_xlabel("tokens of uptraining, % of the parent's pre-training")
    axes.set_ylabel(BEYOND)
    axes.set_xscale("symlog", linthresh=0.25, linscale=0.5)
    axes.set_xticks([0, 0.25, 0.5, 1, 2, 5, 10], ["0", "¼", "½", "1", "2", "5", "10"], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())


def gaps_by_alpha(lines: list[Result], loss: str) -> dict[float, Seeds]:
    """Return the gaps to the parent by the length of uptraining, from none on."""
    alphas = sorted({line["alpha"] for line in lines if line["loss"] in (None, loss)})
    own = {alpha: [x for x in lines if x["alpha"] == alpha and x["loss"] in (None, loss)] for alpha in alphas}
    return {alpha: gaps(at_best_setting(lines)) for alpha, lines in own.items()}
