"""Trend lines per kernel and metric, over all published runs."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.figures.style import BAD, LIMIT, MARKERS, MUTED, SERIES, STYLE, Drawing, drawn
from reports.numbers import severity, show, show_share
from verify.records import decode_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from reports.site.store import Entry

SIZE = (9.6, 3.9)
MOST_POINTS = 160
"""Points of a line; of more runs, each point is the worst of its neighbours."""

MOST_KERNELS = 16


def of_entries(entries: Sequence[Entry]) -> list[tuple[str, Drawing]]:
    """One drawing per kernel, those that runs answer for first."""
    names: dict[str, bool] = {}
    for entry in entries:
        for kernel in entry.kernels:
            names[str(kernel["name"])] = bool(kernel["other"])
    ordered = sorted(names, key=lambda name: names[name])[:MOST_KERNELS]
    return [(name, _of_kernel(name, entries, f"trend-{n}")) for n, name in enumerate(ordered)]


def _of_kernel(name: str, entries: Sequence[Entry], prefix: str) -> Drawing:
    found = [(entry.number, kernel) for entry in entries for kernel in entry.kernels if kernel["name"] == name]
    arrays = list(dict.fromkeys(array for _, kernel in found for array in kernel["shares"]))[: len(SERIES)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.05, right=0.99, top=0.93, bottom=0.12, hspace=0.3, wspace=0.12)
        panels = figure.subplots(2, 2, sharex=True).ravel()
        _shares(panels[0], found, arrays)
        _line(panels[1], found, "cases judged", lambda kernel: kernel["judged"], worst=min)
        _line(panels[2], found, "failures", lambda kernel: kernel["failures"])
        _line(panels[3], found, "query blocks replayed, %", _replay_rate)
        for axes in panels[2:]:
            axes.set_xlabel("run")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        last = found[-1][1]
        shares = ", ".join(f"{array} {show_share(decode_number(share))}" for array, share in last["shares"].items())
        alt = f"Trends of {name} over {len(found)} runs; last: shares {shares}, {last['failures']} failures"
        return drawn(figure, prefix, alt)


def _shares(axes: Axes, found: Sequence[tuple[int, dict[str, Any]]], arrays: Sequence[str]) -> None:
    axes.axhline(1.0, color=LIMIT, linewidth=1.4, linestyle=(0, (5, 2)))
    top = 1.12
    for n, array in enumerate(arrays):
        points = [(number, decode_number(kernel["shares"].get(array))) for number, kernel in found]
        known = [(number, value) for number, value in points if value is not None]
        thinned = _thinned(known, lambda values: max(values, key=severity))
        finite = [(x, y) for x, y in thinned if math.isfinite(y)]
        top = max([top, *(1.05 * y for _, y in finite if y < 10)])
        _draw(axes, finite, n, array)
        beyond = [x for x, y in thinned if not math.isfinite(y) or y > top]
        axes.plot(beyond, [top] * len(beyond), color=BAD, linestyle="none", marker="X", markersize=7, clip_on=False)
    axes.set_ylim(0.0, top)
    axes.set_title("worst share of the certified bound", fontsize=10, loc="left")
    if arrays:
        axes.legend(loc="center left", fontsize=9, ncols=4, handlelength=1.4, columnspacing=0.9, borderpad=0.1)


def _line(
    axes: Axes,
    found: Sequence[tuple[int, dict[str, Any]]],
    title: str,
    value: Callable[[dict[str, Any]], float | None],
    worst: Callable[[Sequence[float]], float] = max,
) -> None:
    points = [(number, y) for number, kernel in found if (y := value(kernel)) is not None]
    _draw(axes, _thinned(points, worst), 0, None)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylim(0.0, 1.15 * max([y for _, y in points if math.isfinite(y)], default=0.0) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer="%" not in title))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if "%" not in title else show(y, 2)))
    if not points:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not reported", color=MUTED, ha="center", va="center", transform=axes.transAxes)


def _draw(axes: Axes, points: Sequence[tuple[float, float]], n: int, label: str | None) -> None:
    x, y = [x for x, _ in points], [y for _, y in points]
    marker = MARKERS[n] if len(points) <= MOST_POINTS // 4 else ""
    axes.plot(x, y, color=SERIES[n], linewidth=1.4, marker=marker, markersize=4, label=label, clip_on=False)


def _thinned(
    points: Sequence[tuple[int, float]], worst: Callable[[Sequence[float]], float]
) -> list[tuple[float, float]]:
    if len(points) <= MOST_POINTS:
        return [(float(x), y) for x, y in points]
    edges = [len(points) * n // MOST_POINTS for n in range(MOST_POINTS + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [(float(part[-1][0]), worst([y for _, y in part])) for part in parts]


def _replay_rate(kernel: dict[str, Any]) -> float | None:
    if kernel["replays"] is None or not kernel["query_blocks"]:
        return None
    return 100.0 * kernel["replays"] / kernel["query_blocks"]
