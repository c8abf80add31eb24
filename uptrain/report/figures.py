"""Draw the panels of a report over tokens, for one run or several."""

import io
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from model.common.plot_style import INK, LINE, MUTED, PAGE, PLOT_STYLE, SERIES
from uptrain.report.curves import Curve, evaluated, measured, moving_mean, thin, tokens_at, window
from uptrain.report.history import History
from uptrain.training.losses import LOSSES

_UNITS = ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True)
class Marks:
    """Style of one run's marks."""

    name: str
    """Name in the legend; empty for a single run, where the legend names the kinds of marks."""
    line: str
    """Colour of lines."""
    points: str
    """Colour of points."""
    x_unit: float
    """Number of tokens that 1 on the x axis stands for."""


@dataclass(frozen=True)
class Panel:
    """Plot of one metric, drawn for the runs that have it."""

    title: str
    y_label: str
    has: Callable[[History], bool]
    draw: Callable[[Axes, History, Marks], None]
    from_zero: bool = False


def _training_loss(axes: Axes, history: History, marks: Marks) -> None:
    _smoothed(axes, measured(history, "loss"), marks)
    _mark_events(axes, history, marks)


def _held_out_loss(axes: Axes, history: History, marks: Marks) -> None:
    _points(axes, evaluated(history, "loss"), marks)
    losses = [e["teacher_loss"] for e in history.evaluations if e.get("teacher_loss") is not None]
    if losses:
        _teacher_line(axes, losses[-1])


def _learning_rate(axes: Axes, history: History, marks: Marks) -> None:
    curve = thin(measured(history, "learning_rate"))
    axes.plot(curve.x / marks.x_unit, curve.y, color=marks.line, label=marks.name, **_marker_of_single_point(curve))
    axes.yaxis.set_major_formatter("{x:.3g}")


def _recovered(axes: Axes, history: History, marks: Marks) -> None:
    curve = evaluated(history, "recovered_fraction")
    _points(axes, Curve(curve.x, 100 * curve.y), marks)
    _teacher_line(axes, 100)
    axes.axhline(0, color=MUTED, linewidth=0.8)


def _kl_divergence(axes: Axes, history: History, marks: Marks) -> None:
    _points(axes, evaluated(history, "kl"), marks)


def _speed(axes: Axes, history: History, marks: Marks) -> None:
    _smoothed(axes, measured(history, "tokens_per_s"), marks)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _has_steps(history: History) -> bool:
    return bool(history.steps)


def _has(key: str) -> Callable[[History], bool]:
    return lambda history: any(e.get(key) is not None for e in history.evaluations)


def _training_panel(objective: str) -> Panel:
    """Return the panel of one kind of training loss. Kinds have different scales, so each has its own panel."""
    title = f"Training loss: {objective}"
    return Panel(title, "nats per token", lambda h: bool(h.steps) and h.objective == objective, _training_loss)


PANELS = (
    *map(_training_panel, LOSSES.values()),
    Panel("Held-out loss: next-token cross-entropy", "nats per token", _has("loss"), _held_out_loss),
    Panel("Recovered fraction", "% of the loss that conversion cost", _has("recovered_fraction"), _recovered),
    Panel("KL divergence from the teacher, held out", "nats per token", _has("kl"), _kl_divergence, from_zero=True),
    Panel("Learning rate", "per step", _has_steps, _learning_rate, from_zero=True),
    Panel("Speed", "tokens per second", _has_steps, _speed, from_zero=True),
)


def draw_png(histories: Sequence[History], names: Sequence[str]) -> bytes:
    """Return all panels as one PNG, for light backgrounds."""
    panels = _panels_with_data(histories)
    n_columns = min(2, len(panels))
    n_rows = -(-len(panels) // n_columns)
    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(5.4 * n_columns, 3.1 * n_rows), layout="constrained")
        if len(names) == 1:
            figure.suptitle(names[0], x=0.01, ha="left", fontsize=12, parse_math=False)
        grid = figure.subplots(n_rows, n_columns, squeeze=False).flat
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, panel, histories, names)
        for axes in list(figure.axes)[len(panels) :]:
            axes.remove()
        buffer = io.BytesIO()
        _save(figure, buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def draw_svgs(histories: Sequence[History], names: Sequence[str]) -> list[str]:
    """Return an SVG of each panel, with the CSS variables of the page as colours."""
    drawings = []
    for panel in _panels_with_data(histories):
        with matplotlib.rc_context(PLOT_STYLE | {"svg.hashsalt": panel.title}):
            figure = Figure(figsize=(5.4, 3.1), layout="constrained")
            _draw(figure.subplots(), panel, histories, names)
            buffer = io.StringIO()
            _save(figure, buffer, format="svg", transparent=True, metadata=_NO_METADATA)
        drawings.append(_inline(buffer.getvalue(), panel.title))
    return drawings


def _save(figure: Figure, buffer: io.BytesIO | io.StringIO, **options: Any) -> None:
    """Save a figure, without warnings that a user can do nothing about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of names in scripts that its fonts lack
        warnings.filterwarnings("ignore", "Creating legend with")  # takes a second on a busy machine
        figure.savefig(buffer, **options)


def _panels_with_data(histories: Sequence[History]) -> list[Panel]:
    return [panel for panel in PANELS if any(panel.has(h) for h in histories)]


def _draw(axes: Axes, panel: Panel, histories: Sequence[History], names: Sequence[str]) -> None:
    furthest = max(h.tokens for h in histories)
    unit, word = next(((n, word) for n, word in _UNITS if furthest >= n), (1, ""))
    for i, (history, name) in enumerate(zip(histories, names, strict=True)):
        colour, label = SERIES[i % len(SERIES)], f" {name}"  # matplotlib omits labels that begin with _
        marks = Marks(label, colour, colour, unit) if len(histories) > 1 else Marks("", SERIES[0], SERIES[1], unit)
        if panel.has(history):
            panel.draw(axes, history, marks)
    axes.set_title(panel.title)
    axes.set_ylabel(panel.y_label)
    axes.set_xlabel(f"tokens, {word}" if word else "tokens")
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlim(-0.02 * furthest / unit, 1.03 * furthest / unit or 1)
    if axes.get_legend_handles_labels()[0]:
        for text in axes.legend().get_texts():
            text.set_parse_math(False)


def _smoothed(axes: Axes, curve: Curve, marks: Marks) -> None:
    """Draw all steps faintly, and their moving mean on top."""
    n, raw, line = window(curve), thin(curve), thin(moving_mean(curve))
    if n > 1:
        axes.plot(raw.x / marks.x_unit, raw.y, color=marks.line, alpha=0.3, linewidth=0.8)
    label = marks.name or (f"mean of {n:,} steps" if n > 1 else "every step")
    axes.plot(line.x / marks.x_unit, line.y, color=marks.line, label=label, **_marker_of_single_point(line))


def _points(axes: Axes, curve: Curve, marks: Marks) -> None:
    style: dict[str, Any] = {"marker": "o", "markersize": 5, "markeredgecolor": PAGE, "linewidth": 1.0}
    axes.plot(curve.x / marks.x_unit, curve.y, color=marks.points, label=marks.name or "this run", zorder=3, **style)


def _marker_of_single_point(curve: Curve) -> dict[str, Any]:
    """Return the style of a marker for a curve of one point, which has no line."""
    return {"marker": "o", "markersize": 5} if len(curve.x) == 1 else {}


def _teacher_line(axes: Axes, y: float) -> None:
    is_named = "teacher" in axes.get_legend_handles_labels()[1]
    axes.axhline(y, color=MUTED, linestyle="--", linewidth=1.2, label="" if is_named else "teacher")


def _mark_events(axes: Axes, history: History, marks: Marks) -> None:
    """Mark resumes by lines, skipped updates by crosses at the bottom, failed saves by triangles at the top.

    With several runs nothing is marked, since the panels would be crowded; the tables of the page list these events.
    """
    if marks.name:
        return
    for i, x in enumerate(tokens_at(history, history.steps_of("resumed")) / marks.x_unit):
        axes.axvline(x, color=MUTED, linestyle=":", linewidth=1.2, label="" if i else "resumed")
    for steps, marker, y, label in (
        (history.skipped_steps, "x", 0.04, "update skipped"),
        (history.steps_of("not saved"), "v", 0.96, "not saved"),
    ):
        if steps:
            style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": 6, "clip_on": False}
            x_values, y_values = tokens_at(history, steps) / marks.x_unit, np.full(len(steps), y)
            axes.plot(x_values, y_values, color=INK, label=label, transform=axes.get_xaxis_transform(), **style)


def _inline(svg: str, title: str) -> str:
    """Return matplotlib's SVG for inclusion in HTML, with CSS variables as colours, which follow the dark mode.

    matplotlib takes only fixed colours, numbers its groups alike in every figure, and always writes size and
    namespaces. The page has several figures and its own size, and an SVG in HTML needs no namespaces.
    """
    names = {INK: "ink", MUTED: "muted", LINE: "line", PAGE: "page"} | {c: f"series-{i}" for i, c in enumerate(SERIES)}
    root = ET.fromstring(svg)  # without comments and doctype
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if element.tag == "g":  # only clip paths and markers are referenced
            attributes.pop("id", None)
        if style := attributes.get("style"):
            for colour, name in names.items():
                style = style.replace(colour, f"var(--{name})")
            attributes["style"] = style.replace("'DejaVu Sans'", "system-ui")
        element.attrib.clear()
        element.attrib.update(attributes)
    view = {"role": "img", "aria-label": title, "viewBox": root.attrib["viewBox"]}
    root.attrib.clear()
    root.attrib.update(view)
    return ET.tostring(root, encoding="unicode")
