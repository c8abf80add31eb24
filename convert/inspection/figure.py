"""Draw the report of `convert inspect --heads`: each layer's losses, and the cosines of the worst layer's heads.

Colours are cividis and viridis, which are readable with colour blindness and keep their order in greyscale: darker is
more. Both scales run from 0 to 1, so that figures of two models are comparable.
"""

import io
import warnings

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage

from convert.inspection.heads import HeadReport, LayerHeads
from convert.inspection.summary import group_label
from convert.layer_tensors.head_matrices import Real
from model.common.plot_style import INK, PLOT_STYLE

EMPTY = "#ececef"
LOST, ALIKE = "cividis_r", "viridis_r"
_ROW_INCHES, _COLUMN_INCHES = 0.27, 0.62
_MAX_ANNOTATED_HEADS = 12
"""Number of heads up to which the cells of a cosine matrix show numbers."""
_STYLE = PLOT_STYLE | {"axes.grid": False, "xtick.major.size": 0, "ytick.major.size": 0}


def draw_png(report: HeadReport, name: str) -> bytes:
    """Return the figure as PNG, for a white background. `name`: the model's name."""
    width = max(2.6, 1.1 + _COLUMN_INCHES * len(report.groups))
    height = max(6.4, 2.0 + _ROW_INCHES * len(report.layers))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(2 * width + 4.2, height), layout="constrained")
        figure.suptitle(f"{name}: loss from sharing K/V heads", x=0.01, ha="left", fontsize=12, parse_math=False)
        sides = figure.add_gridspec(1, 2, width_ratios=[2 * width, 4.2])
        _draw_losses(figure.add_subfigure(sides[0]), report)
        _draw_worst(figure.add_subfigure(sides[1]), report.worst[0])
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of a name in a script that it lacks
            figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_losses(figure: SubFigure, report: HeadReport) -> None:
    titles = ("Keys: % of the logits lost", "Values: % of the output lost")
    grid = figure.subplots(1, 2, sharey=True)
    for axes, title, kind in zip(grid, titles, "kv", strict=True):
        shares_LG = np.array([[getattr(layer.lost["pca"][n], kind) for n in report.groups] for layer in report.layers])
        image = _heat_map(axes, shares_LG, LOST, percent=True)
        axes.set(title=title, xlabel="groups (K/V heads in each layer)", aspect="auto")
        axes.set_xticks(range(len(report.groups)), [f"{n}\n{group_label(n)}" for n in report.groups])
    every = -(-len(report.layers) // 40)
    grid[0].set_yticks(range(0, len(report.layers), every), [layer.layer for layer in report.layers[::every]])
    grid[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=grid, orientation="horizontal", aspect=45, pad=0.02, format="{x:.0%}")
    bar.set_label(
        "share of the energy lost when neighbouring heads share one,\n"
        "merged by --method pca; computed from the weights alone"
    )
    bar.outline.set_visible(False)


def _draw_worst(figure: SubFigure, layer: LayerHeads) -> None:
    grid = figure.subplots(2, 1)
    kinds = (("K", layer.keys_KK), ("V", layer.values_KK))
    for axes, (kind, cosines_KK) in zip(grid, kinds, strict=True):
        # Hide the diagonal: the cosine of a head with itself is always 1.
        pairs_KK = np.where(np.eye(len(cosines_KK), dtype=bool), np.nan, cosines_KK)
        image = _heat_map(axes, pairs_KK, ALIKE, percent=False)
        axes.set(title=f"Layer {layer.layer}, the largest loss: {kind} heads", aspect="equal")
        axes.set(xlabel=f"{kind} head", ylabel=f"{kind} head")
        ticks = range(0, len(cosines_KK), -(-len(cosines_KK) // 16))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
    bar = figure.colorbar(image, ax=grid, orientation="horizontal", aspect=30, pad=0.02)
    bar.set_label("cosine of two heads after alignment\nby rotations that keep the model's output")
    bar.outline.set_visible(False)


def _heat_map(axes: Axes, numbers: Real, colours: str, percent: bool) -> AxesImage:
    colour_map = matplotlib.colormaps[colours]
    image = axes.imshow(numbers, cmap=colour_map, vmin=0, vmax=1, interpolation="nearest")
    axes.spines[:].set_visible(False)
    axes.set_facecolor(EMPTY)
    if percent or len(numbers) <= _MAX_ANNOTATED_HEADS:
        for (row, column), number in np.ndenumerate(numbers):
            if np.isnan(number):
                continue
            text = _percent(float(number)) if percent else f"{number:.2f}".removeprefix("0")
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=_text_colour(colour_map, number))
    return image


def _text_colour(colour_map: Colormap, number: float) -> str:
    """Return a text colour that is readable on the cell of a number."""
    red, green, blue, _ = colour_map(number)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"
