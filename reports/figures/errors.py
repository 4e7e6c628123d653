"""Errors against length, position and family: a mark per case, the worst joined."""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from reports.figures.style import (
    BAD,
    GRID,
    INK,
    LIMIT,
    MARKERS,
    MUTED,
    PANEL,
    SERIES,
    STYLE,
    Drawing,
    drawn,
    logarithmic,
    note,
    rectangles,
    short,
)
from reports.model import FAR_ULP
from reports.numbers import plural, severity, show, show_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.axes import Axes

    from reports.model import Group, Kernel
    from reports.rows import Row

LABEL_WIDTH = 0.14
"""Of a label of four digits, as a share of the axis."""

LARGEST_LINEAR_SHARE = 1.5


def error_by_length(kernel: Kernel, prefix: str) -> list[Drawing]:
    """Share of the bound, absolute and ulp error of `out` against length, ordinary data only.

    A series per head_dim, or per family of keys (`Row.series`).
    """
    rows = [row for row in kernel.judged if row.family == "ordinary" and row.part("out") and row.length and row.series]
    if not rows:
        return []
    panels = (
        ("share", "share of the certified bound", _share_axis),
        ("absolute", "largest absolute error", _absolute_axis),
        ("ulp", "largest error in BF16 ulp", _ulp_axis),
    )
    return [_by_length(rows, f"{prefix}-{measure}", measure, label, axis) for measure, label, axis in panels]


def _by_length(
    rows: Sequence[Row], prefix: str, measure: str, label: str, set_axis: Callable[[Axes, Sequence[float]], float]
) -> Drawing:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=PANEL, layout="constrained")
        axes = figure.add_subplot()
        measured = [(row, x) for row in rows if (part := row.part("out")) and (x := getattr(part, measure)) is not None]
        top = set_axis(axes, [x for _, x in measured if math.isfinite(x)])
        kinds = _kinds([row for row, _ in measured])
        joined = _joined(measured)
        for n, (noun, value) in enumerate(kinds):
            points = [(row, x) for row, x in measured if row.series == (noun, value)]
            name = f"{value}" if n or noun != "head_dim" else f"{noun} {value}"
            _series(axes, points, n, short(name), top, joined)
        axes.set_xscale("log", base=2)
        _length_ticks(axes, sorted(joined))
        of_keys = any(noun == "head_dim" for noun, _ in kinds)
        axes.set_xlabel("keys per row (of the longest sequence)" if of_keys else "tokens of the sequence")
        axes.set_title(label, fontsize=10.5, loc="left", pad=22)
        if measured:
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(-0.03, 0.985),
                ncols=min(len(kinds), 4),
                handletextpad=0.3,
                columnspacing=1.0,
                borderpad=0.2,
                handlelength=1.6,
                fontsize=9.5,
            )
        worst_row, worst = max(measured, key=lambda pair: severity(pair[1]), default=(None, None))
        alt = f"{label} against length, {plural(len(measured), 'case')}"
        if worst_row is not None:
            place = f"length {worst_row.length}, {' '.join(map(str, worst_row.series or ()))}"
            alt += f"; the largest is {show_share(worst)} at {place}"
        return drawn(figure, prefix, alt)


def _series(axes: Axes, points: Sequence[tuple[Row, float]], n: int, label: str, top: float, joined: set[int]) -> None:
    """One head_dim: every case a mark, the worst of each length a line; what is not finite sits at the upper edge."""
    color, marker = SERIES[n % len(SERIES)], MARKERS[n % len(MARKERS)]
    finite = [(row.length, x) for row, x in points if math.isfinite(x)]
    beyond = sorted({row.length for row, x in points if not math.isfinite(x)})
    lengths = sorted({x for x, _ in finite} & joined)
    worst = [max(y for x, y in finite if x == length) for length in lengths]
    axes.plot(lengths, worst, color=color, linewidth=1.4, marker=marker, markersize=4.5, label=label, clip_on=False)
    x, y = [x for x, _ in finite], [y for _, y in finite]
    axes.plot(x, y, color=color, linestyle="none", marker=marker, markersize=3, alpha=0.45, clip_on=False)
    axes.plot(beyond, [top] * len(beyond), color=BAD, linestyle="none", marker="X", markersize=8, clip_on=False)


def _share_axis(axes: Axes, values: Sequence[float]) -> float:
    """Linear up to a little over the bound; logarithmic if something lies far beyond it."""
    largest = max(values, default=1.0)
    axes.axhline(1.0, color=LIMIT, linewidth=1.6, linestyle=(0, (5, 2)))
    if largest <= LARGEST_LINEAR_SHARE:
        top = max(1.12, largest * 1.05)
        axes.set_ylim(0.0, top)
    else:
        top = logarithmic(axes, values, 1.0)
    note(axes, "certified bound", 1.0, LIMIT, above=True)
    return top


def _absolute_axis(axes: Axes, values: Sequence[float]) -> float:
    return logarithmic(axes, values, min((x for x in values if x > 0), default=1.0))


def _ulp_axis(axes: Axes, values: Sequence[float]) -> float:
    """Half an ulp is what correct rounding leaves; beyond a few ulp the axis is logarithmic."""
    largest = max(values, default=1.0)
    axes.axhline(0.5, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)))
    if largest <= FAR_ULP:
        top = max(1.1, largest * 1.15)
        axes.set_ylim(0.0, top)
    else:
        top = logarithmic(axes, values, 1.0)
    note(axes, "correct rounding: ½", 0.5, MUTED, above=False)
    return top


def _kinds(rows: Iterable[Row]) -> list[tuple[str, int | str]]:
    """The series of some rows, in one order whatever the rows': widths by size, families by name."""
    found = {row.series for row in rows if row.series is not None}
    return sorted(found, key=lambda kind: (kind[0], kind[1] if isinstance(kind[1], int) else 0, str(kind[1])))


def _joined(measured: Sequence[tuple[Row, float]]) -> set[int]:
    """Lengths at which every series was measured, which lines may join; all lengths if there is none."""
    found: dict[Any, set[int]] = {}
    for row, _ in measured:
        found.setdefault(row.series, set()).add(row.length)
    common = set.intersection(*found.values()) if found else set[int]()
    return common or {length for lengths in found.values() for length in lengths}


def _length_ticks(axes: Axes, lengths: Sequence[int]) -> None:
    """Ticks at the first, the last, and as many lengths between as can be told apart."""
    shown = [lengths[-1]] if lengths else []
    gap = (lengths[-1] / lengths[0]) ** LABEL_WIDTH if lengths else 1.0
    shown += [x for x in lengths[:1] if x != lengths[-1]]
    for length in reversed(lengths[1:-1]):
        if all(max(length / other, other / length) >= gap for other in shown):
            shown.append(length)
    axes.xaxis.set_major_locator(FixedLocator(sorted(shown)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))


BINS = 50
ROW_HEIGHT = 0.62


def share_by_family(kernel: Kernel, prefix: str) -> Drawing | None:
    """How the worst share of each case is distributed, a histogram per family on a common axis."""
    families = [group for group in kernel.families if any(row.share is not None for row in group.judged)]
    if not families:
        return None
    finite = [
        row.share for group in families for row in group.judged if row.share is not None and math.isfinite(row.share)
    ]
    largest = max(finite, default=1.0)
    log = largest > LARGEST_LINEAR_SHARE
    top = min(3.0 * largest, sys.float_info.max / 10) if log else max(1.0, largest)
    with mpl.rc_context({**STYLE, "axes.grid": False, "axes.spines.left": False}):
        figure = Figure(figsize=(PANEL[0], 0.8 + ROW_HEIGHT * len(families)), layout="constrained")
        axes = figure.add_subplot()
        if log:
            axes.set_xscale("symlog", linthresh=1.0)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: show(x, 1)))
        axes.set_xlim(0.0, top * 1.04)
        for place, group in enumerate(families):
            _histogram(axes, group, len(families) - 1 - place, top, log=log)
        axes.axvline(1.0, color=LIMIT, linewidth=1.6, linestyle=(0, (5, 2)))
        axes.set_ylim(-0.12, len(families))
        axes.set_yticks([len(families) - 1 - n + 0.12 for n in range(len(families))])
        axes.set_yticklabels([short(group.name) for group in families])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("largest share of the bound, case by case")
        parts = [f"{group.name}: worst {show_share(group.worst_row.share)}" for group in families if group.worst_row]
        return drawn(figure, prefix, "Distribution of the share of the bound by family; " + ", ".join(parts))


def _histogram(axes: Axes, group: Group, base: int, top: float, *, log: bool) -> None:
    shares = [row.share for row in group.judged if row.share is not None]
    finite = [x for x in shares if math.isfinite(x)]
    edges = [top * n / BINS for n in range(BINS + 1)]
    if log:
        edges = [math.sinh(math.asinh(top) * n / BINS) for n in range(BINS + 1)]
    counts = [0] * BINS
    for x in finite:
        counts[next((n for n in range(BINS) if x <= edges[n + 1]), BINS - 1)] += 1
    tallest = max(counts, default=0) or 1
    heights = [0.72 * math.sqrt(count / tallest) for count in counts]
    bars = [
        (a, base, b, base + height) for (a, b), height in zip(itertools.pairwise(edges), heights, strict=True) if height
    ]
    rectangles(axes, bars, SERIES[0], 0.75)
    axes.axhline(base, color=GRID, linewidth=0.8)
    worst = max(shares, key=severity)
    if math.isfinite(worst):
        axes.plot([worst], [base], color=INK if worst <= 1 else BAD, marker="^", markersize=6, clip_on=False)
    else:
        axes.plot([top * 1.02], [base + 0.3], color=BAD, marker="X", markersize=8, clip_on=False)


LEAST_TOKENS = 2
MOST_LINES = 4
"""Sequence lengths in one figure, the longest ones: as many as its legend holds in a line."""


def share_by_head_dim(kernel: Kernel, prefix: str) -> Drawing | None:
    """The share of the bound of every case of ordinary data, side by side per head_dim."""
    rows = [row for row in kernel.judged if row.family == "ordinary" and row.share is not None]
    rows = [row for row in rows if row.length and isinstance(row.shape.get("head_dim"), int)]
    dims = sorted({row.shape["head_dim"] for row in rows})
    if len(dims) < LEAST_TOKENS:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=PANEL, layout="constrained")
        axes = figure.add_subplot()
        top = _share_axis(axes, [row.share for row in rows if row.share is not None and math.isfinite(row.share)])
        for place, dim in enumerate(dims):
            shares = [row.share for row in rows if row.shape["head_dim"] == dim and row.share is not None]
            _strip(axes, place, shares, top)
        axes.set_xticks(range(len(dims)), [str(dim) for dim in dims])
        axes.set_xlim(-0.6, len(dims) - 0.4)
        axes.set_xlabel("head_dim")
        axes.set_title("share of the certified bound", fontsize=10.5, loc="left")
        worst = max(rows, key=lambda row: severity(row.share))
        alt = f"Share of the bound by head_dim; the largest is {show_share(worst.share)} at {worst.shape['head_dim']}"
        return drawn(figure, prefix, alt)


def _strip(axes: Axes, place: int, shares: Sequence[float], top: float) -> None:
    """Every case a mark, spread sideways in order of size, and the median a line."""
    finite = sorted(x for x in shares if math.isfinite(x))
    spread = [place + 0.5 * ((n * 0.618) % 1.0 - 0.5) for n in range(len(finite))]
    axes.plot(spread, finite, color=SERIES[0], linestyle="none", marker="o", markersize=3.2, alpha=0.55, clip_on=False)
    if finite:
        middle = finite[len(finite) // 2]
        axes.plot([place - 0.32, place + 0.32], [middle, middle], color=INK, linewidth=1.4)
    if len(finite) < len(shares):
        axes.plot([place], [top], color=BAD, linestyle="none", marker="X", markersize=8, clip_on=False)


def share_by_draw(kernel: Kernel, prefix: str) -> list[Drawing]:
    """The share of the bound of every case by family of keys, by write strength and by decay, a panel each."""
    rows = [row for row in kernel.judged if row.drawn and row.share is not None]
    words = {"keys": "by family of keys", "beta": "by write strength", "decay": "by decay"}
    found = []
    for axis, title in words.items():
        values = list(dict.fromkeys(row.drawn[axis] for row in rows if row.drawn.get(axis)))
        if len(values) >= LEAST_TOKENS:
            found.append(_by_draw(rows, axis, values, title, f"{prefix}-{axis}"))
    return found


def _by_draw(rows: Sequence[Row], axis: str, values: Sequence[str], title: str, prefix: str) -> Drawing:
    with mpl.rc_context({**STYLE, "axes.spines.left": False}):
        figure = Figure(figsize=(PANEL[0], 1.0 + 0.3 * len(values)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="y")
        finite = [row.share for row in rows if row.share is not None and math.isfinite(row.share)]
        top = max(1.0, max(finite, default=1.0))
        if top > LARGEST_LINEAR_SHARE:
            axes.set_xscale("symlog", linthresh=1.0)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: show(x, 1)))
        axes.axvline(1.0, color=LIMIT, linewidth=1.6, linestyle=(0, (5, 2)))
        for place, value in enumerate(reversed(values)):
            shares = [row.share for row in rows if row.drawn.get(axis) == value and row.share is not None]
            here = sorted(x for x in shares if math.isfinite(x))
            y = [place] * len(here)
            axes.plot(here, y, color=SERIES[0], alpha=0.5, linestyle="none", marker="o", markersize=3.6, clip_on=False)
            if here:
                middle = here[len(here) // 2]
                axes.plot([middle], [place], color=INK, marker="|", markersize=11, linestyle="none")
            if len(here) < len(shares):
                axes.plot([top * 1.02], [place], color=BAD, linestyle="none", marker="X", markersize=8, clip_on=False)
        axes.set_xlim(0.0, top * 1.04)
        axes.set_ylim(-0.6, len(values) - 0.4)
        axes.set_yticks(range(len(values)), [short(value) for value in reversed(values)])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("share of the certified bound")
        axes.set_title(title, fontsize=10.5, loc="left")
        worst = max(rows, key=lambda row: severity(row.share))
        alt = f"Share of the bound {title}; the largest is {show_share(worst.share)} at {worst.drawn.get(axis)}"
        return drawn(figure, prefix, alt)


def error_by_position(kernel: Kernel, prefix: str) -> Drawing | None:
    """The worst share of each power-of-two range of positions, a line per length: growth over tokens."""
    found: dict[int, dict[int, float]] = {}
    for row in kernel.judged:
        part = row.parts[0] if row.parts else None
        if row.family not in ("ordinary", "trace") or part is None or part.growth is None or not part.growth.ranges:
            continue
        tokens = part.growth.ranges[-1][1] + 1
        line = found.setdefault(tokens, {})
        for first, _, value in part.growth.ranges:
            line[first] = max(line.get(first, 0.0), value, key=severity)
    chosen = sorted(tokens for tokens in found if len(found[tokens]) > LEAST_TOKENS)[-MOST_LINES:]
    if not chosen:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=PANEL, layout="constrained")
        axes = figure.add_subplot()
        finite = [x for tokens in chosen for x in found[tokens].values() if math.isfinite(x)]
        top = _share_axis(axes, finite)
        for n, tokens in enumerate(chosen):
            line = sorted(found[tokens].items())
            x = [first + 1 for first, value in line if math.isfinite(value)]
            y = [value for _, value in line if math.isfinite(value)]
            label = f"{tokens}{' tokens' * (n == 0)}"
            axes.plot(
                x, y, color=SERIES[n], marker=MARKERS[n], markersize=4.5, linewidth=1.4, label=label, clip_on=False
            )
            beyond = [first + 1 for first, value in line if not math.isfinite(value)]
            axes.plot(beyond, [top] * len(beyond), color=BAD, linestyle="none", marker="X", markersize=8, clip_on=False)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("position of the row (first of its range, from 1)")
        axes.set_title("share of the certified bound", fontsize=10.5, loc="left", pad=22)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.985), ncols=4, fontsize=9.5, handlelength=1.6,
                    handletextpad=0.3, columnspacing=1.0, borderpad=0.2)  # fmt: skip
        alt = f"Worst share of the bound by position, for sequences of {', '.join(map(str, chosen))} tokens"
        return drawn(figure, prefix, alt)
