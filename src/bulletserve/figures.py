"""How all our pictures look, and how they are written: colours, style, SVG beside PNG.

Knows nothing about what is drawn. Colours are Okabe and Ito's, which all kinds of colour vision tell apart; what
matters has a shape of its own too. Needs matplotlib.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter

BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, RED, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#D55E00", "#666666",
)  # fmt: skip
KIND_COLOURS = {"prefill": ORANGE, "decode": BLUE, "mixed": GREEN}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bullet",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
}


def log_ms(panel: Axes) -> None:
    """Make the x axis of a panel that is drawn a logarithmic one, with plain numbers and at least three of them."""
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    several: Locator = LogLocator(subs=(1.0,) if high > 1000 * low else (1.0, 2.0, 5.0))
    panel.xaxis.set_major_locator(several if high > 10 * low else MaxNLocator(6))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, folder: Path, name: str) -> Path:
    """Write it into `folder` as SVG and PNG and close it; the path of the PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    figure.savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")
    plt.close(figure)
    return folder / f"{name}.png"
