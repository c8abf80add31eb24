"""Define the style of all figures: colours, fonts and lines, as matplotlib's rcParams. Needs no matplotlib.

The series colours are Okabe and Ito's palette for colour blindness. Give every series a marker of its own too.
"""

from typing import Any

INK, MUTED, LINE, PAGE = "#1c1c1e", "#6e6e73", "#d9d9de", "#ffffff"
"""Text and marks; secondary text; grid; background."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PLOT_STYLE: dict[Any, Any] = {
    "figure.dpi": 150, "figure.facecolor": PAGE,
    "figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.1,
    "font.size": 9, "font.sans-serif": ["DejaVu Sans"], "text.color": INK,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": INK,
    "axes.labelcolor": MUTED, "axes.edgecolor": MUTED, "axes.facecolor": PAGE,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.6, "lines.linewidth": 1.6,
    "axes.prop_cycle": f"cycler(color={list(SERIES)})",
    "legend.edgecolor": "none", "legend.framealpha": 0.75, "legend.fontsize": 8, "legend.labelcolor": INK,
    "svg.fonttype": "none",
}  # fmt: skip
