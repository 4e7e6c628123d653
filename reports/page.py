"""A report as one self-contained HTML page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Callable  # noqa: TC003  a field's type
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from reports import figures, numbers
from reports.model import FAMILIES, Kernel
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reports.figures import Drawing
    from reports.model import Report
    from reports.rows import Element, Row

HERE = Path(__file__).parent
MOST_ROWS = 2000
"""Rows of a table of cases; a page of more is no longer read, and the records hold all of them."""

MOST_FAILURES = 50
MOST_ELEMENTS = {"out": 10, "lse": 5}
MOST_PATTERNS = 24
MOST_CELLS = 1024
MOST_FIGURES = 8


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Cases of which the same query blocks were replayed."""

    replay_map: tuple[tuple[tuple[int, ...], ...], ...]
    rows: tuple[Row, ...]

    @property
    def heads(self) -> list[tuple[int, ...]]:
        """One tuple of query blocks per batch entry and head."""
        return [head for batch in self.replay_map for head in batch]

    @property
    def blocks(self) -> int:
        """Query blocks of the widest line."""
        return max((len(head) for head in self.heads), default=0)

    @property
    def replayed(self) -> int:
        """How many blocks were replayed."""
        return sum(1 for head in self.heads for flag in head if flag)

    @property
    def drawable(self) -> bool:
        """Whether it is small enough to be drawn."""
        return 0 < self.blocks * len(self.heads) <= MOST_CELLS

    @property
    def words(self) -> str:
        """The map in words."""
        total = sum(len(head) for head in self.heads)
        places = [
            f"head {h}: block {', '.join(str(b) for b, flag in enumerate(head) if flag)}"
            for h, head in enumerate(self.heads)
            if any(head)
        ]
        shown = "; ".join(places[:8]) + ("; and more" if len(places) > 8 else "")
        return f"{self.replayed} of {numbers.plural(total, 'query block')} replayed ({shown})"


@dataclasses.dataclass(frozen=True)
class KernelView:
    """What a page shows of one kernel."""

    anchor: str
    kernel: Kernel
    by_length: Sequence[Drawing]
    by_family: Drawing | None
    patterns: Sequence[Pattern]
    elements: Sequence[tuple[str, Sequence[tuple[Row, Element]]]]
    rows: Sequence[Row]
    ranks: Callable[[str], Sequence[int]]


def render(report: Report, *, records_link: str | None, sources: Sequence[str]) -> str:
    """The page.

    Args:
        report: what to show.
        records_link: relative address of the records beside the page.
        sources: names of the files that the records came from.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "number": numbers.show,
        "share": numbers.show_share,
        "exact": numbers.show_exact,
        "seconds": numbers.show_seconds,
        "plural": numbers.plural,
        "slug": slug,
    }
    environment.filters.update(filters)
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        report=report,
        views=[_view(kernel, n) for n, kernel in enumerate(report.kernels, start=1)],
        headline=headline,
        dates=numbers.show_dates(report.first_date, report.last_date),
        families=FAMILIES,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),  # noqa: S704  our own file
        script=Markup(script),  # noqa: S704  our own file
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        records_link=records_link,
        sources=sources,
        most_failures=MOST_FAILURES,
        most_figures=MOST_FIGURES,
    )


def slug(row: Row) -> str:
    """A row's fragment identifier: made of the digest of its names, which may hold anything."""
    names = "\n".join((row.subject, row.family, row.case, row.sha256, str(sorted(row.environment.items(), key=str))))
    return "case-" + hashlib.sha256(names.encode()).hexdigest()[:12]


def headline(kernel: Kernel) -> str:
    """The answer in a sentence."""
    judged = len(kernel.judged)
    if kernel.verdict == "nothing compared":
        return "Nothing was compared."
    if kernel.verdict == Verdict.BACKEND_UNSOUND:
        return "The backend failed its probes: no verdict can rest on what it computed."
    failed = kernel.verdicts[Verdict.FAIL]
    if failed:
        verb = "breaks" if failed == 1 else "break"
        return f"{failed:,} of {numbers.plural(judged, 'judged case')} {verb} the contract."
    cases = "The one judged case keeps" if judged == 1 else f"All {judged:,} judged cases keep"
    return f"{cases} the contract: every compared element lies within its certified bound."


def _view(kernel: Kernel, n: int) -> KernelView:
    anchor = f"kernel-{n}"
    rows = kernel.rows[:MOST_ROWS]
    drawn = n <= MOST_FIGURES
    elements = [(array, kernel.elements(array, limit)) for array, limit in MOST_ELEMENTS.items()]
    return KernelView(
        anchor=anchor,
        kernel=kernel,
        by_length=figures.error_by_length(kernel, f"{anchor}-length") if drawn else [],
        by_family=figures.share_by_family(kernel, f"{anchor}-family") if drawn else None,
        patterns=_patterns(kernel),
        elements=[(array, found) for array, found in elements if found],
        rows=rows,
        ranks=lambda column: _ranks(rows, column),
    )


def _patterns(kernel: Kernel) -> list[Pattern]:
    found: dict[Any, list[Row]] = {}
    for row in kernel.replayed:
        found.setdefault(row.replay_map, []).append(row)
    patterns = [Pattern(replay_map, tuple(rows)) for replay_map, rows in found.items() if replay_map is not None]
    return sorted(patterns, key=lambda pattern: (-len(pattern.rows), -pattern.replayed))


def _ranks(rows: Sequence[Row], column: str) -> Sequence[int]:
    """Sort keys of a numeric column."""
    if column == "replays":
        return numbers.ranks([row.replays for row in rows])
    array, measure = column.split(".")
    return numbers.ranks([None if (part := row.part(array)) is None else getattr(part, measure) for row in rows])
