"""The inverse's error per merge level and family of keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from reports.figures.style import INK, MARKERS, PANEL, SERIES, STYLE, Drawing, drawn
from reports.numbers import show

if TYPE_CHECKING:
    from collections.abc import Sequence

LOWEST = 1e-9


def level_map(rows: Sequence[dict[str, Any]], title: str, prefix: str) -> Drawing | None:
    """A line per family: a mark per level at its worst error, a tick at the certified bound of the last level."""
    families = list(dict.fromkeys(str(row["keys"]) for row in rows))
    if not families:
        return None
    levels = sorted({int(row["level"]) for row in rows})
    with mpl.rc_context({**STYLE, "axes.spines.left": False}):
        figure = Figure(figsize=(PANEL[0], 0.9 + 0.3 * len(families)), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="y")
        for place, family in enumerate(families):
            y = len(families) - 1 - place
            own = {int(row["level"]): row for row in rows if row["keys"] == family}
            errors = [_shown(own[level]["error"]) for level in levels if level in own]
            axes.plot([min(errors), max(errors)], [y, y], color=INK, linewidth=0.8, alpha=0.35)
            for n, level in enumerate(levels):
                if level in own:
                    axes.plot(
                        [_shown(own[level]["error"])],
                        [y],
                        color=SERIES[n],
                        marker=MARKERS[n],
                        markersize=5.5,
                        linestyle="none",
                        label=f"{'blocks of ' * (n == 0)}{level}" if place == 0 else None,
                        clip_on=False,
                    )
            axes.plot([_shown(own[levels[-1]]["bound"])], [y], color=INK, marker="|", markersize=11, linestyle="none")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "0" if x <= LOWEST else show(x, 1)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(range(len(families)), families[::-1])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-0.6, len(families) - 0.4)
        axes.set_xlabel("largest error of an entry")
        axes.set_title(title, fontsize=10.5, loc="left", pad=22)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.985), ncols=3, fontsize=9.5, handletextpad=0.1,
                    columnspacing=1.0, borderpad=0.2)  # fmt: skip
        return drawn(figure, prefix, f"Error of the inverse by level and keys, {title}")


def _shown(x: float | str) -> float:
    value = float(x)
    return value if math.isfinite(value) and value > LOWEST else LOWEST if value <= LOWEST else 1e30
