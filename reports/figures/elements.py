"""What all elements say: where errors lie in a head, how many ulp they have, and which way they lean."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from reports.figures.style import BAD, LIMIT, MARKERS, PANEL, SERIES, STYLE, Drawing, drawn, rectangles
from reports.numbers import plural, show_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reports.model import Kernel
    from reports.rows import Row

type Box = tuple[float, float, float, float]

FAINTEST = 0.04
LABEL_WIDTH = 0.11
"""Of a label such as 2^16, as a share of the axis."""

LEAST = 1e-4
"""What is smaller is written with an exponent, or stands at the edge of a logarithmic axis."""


def heat_map(row: Row, prefix: str) -> Drawing | None:
    """The largest share over (row, lane) in the head with the worst element."""
    if row.heat is None:
        return None
    rows, columns, cells = row.heat
    with mpl.rc_context({**STYLE, "axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=PANEL, layout="constrained")
        axes = figure.add_subplot()
        for (color, strength), boxes in _cells(rows, columns, cells).items():
            rectangles(axes, boxes, color, strength)
        axes.set_xlim(columns[0], columns[-1])
        axes.set_ylim(rows[-1], rows[0])
        matrix = row.part("inverse") is not None
        axes.set_xlabel("column" if matrix else "lane of the output")
        axes.set_ylabel("row" if matrix else "row (token)" if row.drawn else "row (query)")
        axes.tick_params(length=2)
        axes.set_title("share of the bound, faint 0 to full 1", fontsize=10.5, loc="left")
        largest = show_share(row.share)
        alt = f"Heat map of the share of the bound over rows and lanes in {row.case}; the largest is {largest}"
        return drawn(figure, prefix, alt)


def _cells(rows: list[int], columns: list[int], cells: np.ndarray) -> dict[tuple[str, float], list[Box]]:
    """The boxes of each colour and strength; what was not judged has none."""
    found: dict[tuple[str, float], list[Box]] = {}
    for r, (top, bottom) in enumerate(itertools.pairwise(rows)):
        for c, (left, right) in enumerate(itertools.pairwise(columns)):
            share = float(cells[r, c])
            if share < 0.0:
                continue
            within = share <= 1.0
            strength = round(max(share, FAINTEST), 2) if within else 1.0
            found.setdefault((SERIES[0] if within else BAD, strength), []).append((left, top, right, bottom))
    return found


def ulp_distribution(kernel: Kernel, prefix: str) -> Drawing | None:
    """How many elements err by how many ulp of the output's format, over all judged cases that say."""
    counts: dict[float, int] = {}
    array = kernel.arrays[0] if kernel.arrays else ""
    for row in kernel.judged:
        part = row.part(array)
        for edge, count in part.ulp_counts if part else ():
            counts["nan" if math.isnan(edge) else edge] = counts.get("nan" if math.isnan(edge) else edge, 0) + count  # type: ignore[index]
    if not counts:
        return None
    odd = sum(counts.pop(edge, 0) for edge in ("nan", math.inf))  # type: ignore[call-overload]
    edges = sorted(counts)
    total = sum(counts.values()) + odd
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=PANEL, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="x")
        heights = [counts[edge] / total for edge in edges]
        places = [_place(edge) for edge in edges]
        colors = [SERIES[0] if edge <= 0.5 else SERIES[1] for edge in edges]
        axes.bar(places, heights, width=0.86, color=colors, linewidth=0)
        ticks, labels = list(places[:1]), [_edge(edges[0])]
        gap = max(2.4, LABEL_WIDTH * (places[-1] - places[0]))
        for place, edge in zip(places, edges, strict=True):
            if place - ticks[-1] >= gap or (edge in (0.5, 1.0) and gap == 2.4):
                ticks.append(place)
                labels.append(_edge(edge))
        if odd:
            place = max(places, default=0) + 2
            axes.bar([place], [odd / total], width=0.86, color=BAD, linewidth=0)
            ticks.append(place)
            labels.append("other class")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _percent(y)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xticks(ticks, labels)
        axes.set_xlabel(f"error in ulp of {array}: at most")
        axes.set_title(f"share of {total:,} elements", fontsize=10.5, loc="left")
        right = sum(counts[edge] for edge in edges if edge <= 0.5) / total
        alt = f"Distribution of errors in ulp: {_percent(right)} of {plural(total, 'element')} within half an ulp"
        return drawn(figure, prefix, alt)


def _place(edge: float) -> float:
    return -4.0 if edge == 0.0 else math.log2(edge)


def _edge(edge: float) -> str:
    words = {0.0: "0", 0.25: "¼", 0.5: "½"}
    if edge in words:
        return words[edge]
    return f"{edge:.0f}" if edge < 2048 else f"2^{math.log2(edge):.0f}"


def _percent(x: float) -> str:
    return f"{100 * x:.3g} %" if x >= LEAST else f"{x:.0e}"


def bias_map(kernel: Kernel, prefix: str) -> Drawing | None:
    """Every case's two bias statistics over their limits; beyond 1 is an alarm."""
    points = _bias_points(kernel)
    if not points:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=PANEL, layout="constrained")
        axes = figure.add_subplot()
        arrays = list(dict.fromkeys(array for array, _, _ in points))
        for n, array in enumerate(arrays[: len(SERIES)]):
            x = [_shown(lean) for name, lean, _ in points if name == array]
            y = [_shown(square) for name, _, square in points if name == array]
            axes.plot(
                x, y, color=SERIES[n], linestyle="none", marker=MARKERS[n], markersize=3.6, alpha=0.6, label=array
            )
        axes.axvline(1.0, color=LIMIT, linewidth=1.4, linestyle=(0, (5, 2)))
        axes.axhline(1.0, color=LIMIT, linewidth=1.4, linestyle=(0, (5, 2)))
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_minor_locator(NullLocator())
        axes.set_xlabel("lean over its limit")
        axes.set_title("mean square over its limit", fontsize=10.5, loc="left", pad=22)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.985), ncols=4, fontsize=9.5, handletextpad=0.1,
                    columnspacing=1.0, borderpad=0.2)  # fmt: skip
        beyond = sum(1 for _, lean, square in points if not (lean < 1 and square < 1))
        alt = f"Bias statistics of {plural(len(points), 'array')}, {beyond} of them beyond a limit"
        return drawn(figure, prefix, alt)


def _shown(x: float) -> float:
    return float(np.clip(x, LEAST, 1e3)) if math.isfinite(x) else 1e3


def _bias_points(kernel: Kernel) -> Sequence[tuple[str, float, float]]:
    found = []
    for row in kernel.judged:
        for part in row.parts:
            bias = part.bias
            if bias is None or bias.lean is None or not bias.lean_limit or bias.mean_square is None:
                continue
            square = bias.mean_square / bias.mean_square_limit if bias.mean_square_limit else 0.0
            found.append((part.array, bias.lean / bias.lean_limit, square))
    return found
