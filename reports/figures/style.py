"""What every figure shares: sentinel colours, style, axes, and the way to an inline SVG.

A figure is drawn with sentinel colours that become CSS variables, so that one file serves light, dark and print; text
stays text, in the page's font.
"""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, NullLocator

from reports.numbers import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, LIMIT, BAD = "#010101", "#020202", "#030303", "#040404", "#050505"
SERIES = ("#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05", "#0a0a06")
MARKERS = ("o", "s", "^", "D", "v", "P")
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    LIMIT: "--limit",
    BAD: "--fail",
    **{color: f"--series-{n}" for n, color in enumerate(SERIES, start=1)},
}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flywheel",
    "text.parse_math": False,
    "font.size": 10.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}

PANEL = (4.6, 3.1)
"""Inches of one panel: at 96 pixels per inch wide enough for a phone held upright, two side by side on a desk."""

SMALLEST_SHOWN = 1e-12
"""Relative to the top of a logarithmic axis: what lies further below is drawn as zero."""

LONGEST_NAME = 18


@dataclasses.dataclass(frozen=True)
class Drawing:
    """An SVG and the sentence that stands for it where it cannot be seen."""

    svg: Markup
    alt: str


def logarithmic(axes: Axes, values: Sequence[float], linear_to: float) -> float:
    """Logarithmic above `linear_to`, with room for 0 below it."""
    top = min(max([linear_to, *values]) * 3.0, sys.float_info.max / 10)
    axes.set_yscale("symlog", linthresh=max(linear_to, SMALLEST_SHOWN * top))
    axes.set_ylim(0.0, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: show(x, 1)))
    axes.yaxis.set_minor_locator(NullLocator())
    return top


def note(axes: Axes, text: str, y: float, color: str, *, above: bool) -> None:
    """A word at the right end of a horizontal line."""
    axes.annotate(
        text,
        (1.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3 if above else -3),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        color=color,
        fontsize=9,
    )


def rectangles(axes: Axes, boxes: Sequence[tuple[float, float, float, float]], color: str, alpha: float) -> None:
    """Rectangles (left, bottom, right, top) of one colour as one path: hundreds of patches take seconds to draw."""
    if not boxes:
        return
    corners = [[(a, b), (c, b), (c, d), (a, d), (a, b)] for a, b, c, d in boxes]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    path = Path([corner for box in corners for corner in box], codes)
    axes.add_artist(PathPatch(path, facecolor=color, alpha=alpha, linewidth=0))


def short(name: str) -> str:
    """A name that fits an axis."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def drawn(figure: Figure, prefix: str, alt: str) -> Drawing:
    """The finished figure; `prefix` makes its ids unique in the page."""
    figure.patch.set_alpha(0.0)
    for axes in figure.axes:
        axes.patch.set_alpha(0.0)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Drawing(Markup(_clean(buffer.getvalue(), prefix, alt)), alt)  # noqa: S704  matplotlib escapes its text


def _clean(text: str, prefix: str, alt: str) -> str:
    """The SVG element alone, sized by the page, its ids made unique, its colours turned into variables."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', body)
    assert box is not None  # noqa: S101  matplotlib always writes one
    inner = body[body.index(">") + 1 :]
    inner = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', inner)
    inner = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", inner)
    inner = re.sub(r'href="#([^"]*)"', rf'href="#{prefix}-\1"', inner)
    inner = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px; font-family: inherit", inner)
    inner = inner.replace("xlink:href", "href")
    inner = re.sub(r"<!--.*?-->\s*", "", inner, flags=re.DOTALL)
    inner = re.sub(r'="[^"]*"', lambda match: re.sub(r"(\d\.\d{2})\d+", r"\1", match[0]), inner)
    for color, variable in VARIABLES.items():
        inner = inner.replace(color, f"var({variable})")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box[1]}" class="figure"'
    return f'{head} role="img" aria-label="{escape(alt)}">{inner}'
