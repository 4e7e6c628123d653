"""A report as one self-contained HTML page."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
from collections.abc import Callable  # noqa: TC003  a field's type
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from reports import numbers
from reports.audit.summary import GROUPS, headlines
from reports.figures import elements, errors
from reports.figures import inverse as inverse_figures
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reports.audit.summary import Table
    from reports.equations import Ranking
    from reports.figures.style import Drawing
    from reports.findings import Campaign, Finding
    from reports.lemmas import Lemma
    from reports.model import Kernel, Report
    from reports.rows import Element, Row
    from reports.speed import Speed

HERE = Path(__file__).parent
MOST_ROWS = 2000
"""Rows of a table of cases; a page of more is no longer read, and the records hold all of them."""

MOST_PEER_ROWS = 40
MOST_FAILURES = 50
MOST_ELEMENTS = {0: 10}
MOST_ELEMENTS_OF_OTHERS = 5
MOST_PATTERNS = 24
MOST_CELLS = 1024
MOST_FIGURES = 8


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a page shows.

    Attributes:
        report: the records.
        failures: of the kernels that the report answers for.
        findings: in kernels in public use.
        peer_failures: of the peers in these records.
        campaigns: what searches have done.
        lemmas: None if no source has any.
        inverse: its table; None likewise.
        rankings: of equations.
        speed: modelled.
        audit: tables of the metric audit; empty if there is none.
    """

    report: Report
    failures: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    peer_failures: tuple[Finding, ...] = ()
    campaigns: tuple[Campaign, ...] = ()
    lemmas: tuple[Lemma, ...] | None = None
    inverse: dict[str, Any] | None = None
    rankings: tuple[Ranking, ...] = ()
    speed: Speed | None = None
    audit: tuple[Table, ...] = ()


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
    by_head_dim: Drawing | None
    by_draw: Sequence[Drawing]
    by_position: Drawing | None
    by_family: Drawing | None
    heat: tuple[Row, Drawing] | None
    ulp: Drawing | None
    bias: Drawing | None
    patterns: Sequence[Pattern]
    elements: Sequence[tuple[str, Sequence[tuple[Row, Element]]]]
    rows: Sequence[Row]
    ranks: Callable[[str], Sequence[int]]


@functools.cache
def environment() -> jinja2.Environment:
    """The templates, with everything from records escaped."""
    found = jinja2.Environment(
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
        "duration": numbers.show_duration,
        "plural": numbers.plural,
        "slug": slug,
    }
    found.filters.update(filters)
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))  # noqa: S704  our own file
    shared: dict[str, Any] = {"style": style} | _script("page.js")
    found.globals |= shared
    return found


def _script(name: str) -> dict[str, Any]:
    text = (HERE / name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"script": Markup(text), "script_hash": digest}  # noqa: S704  our own file


def render(contents: Contents, *, records_link: str | None, sources: Sequence[str]) -> str:
    """The page.

    Args:
        contents: what to show.
        records_link: relative address of the records beside the page.
        sources: names of the sources.
    """
    report = contents.report
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            contents=contents,
            report=report,
            views=[_view(kernel, n) for n, kernel in enumerate(report.answered_for, start=1)],
            peers=[(f"peer-{n}", kernel) for n, kernel in enumerate(report.peers, start=1)],
            headline=headline,
            dates=numbers.show_dates(report.first_date, report.last_date),
            inverse_drawings=_inverse_drawings(contents.inverse),
            audit_headlines=headlines(contents.audit),
            audit_groups=GROUPS,
            records_link=records_link,
            sources=sources,
            most_failures=MOST_FAILURES,
            most_figures=MOST_FIGURES,
            most_peer_rows=MOST_PEER_ROWS,
        )
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
    found = [
        (array, kernel.elements(array, MOST_ELEMENTS.get(place, MOST_ELEMENTS_OF_OTHERS)))
        for place, array in enumerate(kernel.arrays[:3])
    ]
    return KernelView(
        anchor=anchor,
        kernel=kernel,
        by_length=errors.error_by_length(kernel, f"{anchor}-length") if drawn else [],
        by_head_dim=errors.share_by_head_dim(kernel, f"{anchor}-dim") if drawn else None,
        by_draw=errors.share_by_draw(kernel, f"{anchor}-draw") if drawn else [],
        by_position=errors.error_by_position(kernel, f"{anchor}-position") if drawn else None,
        by_family=errors.share_by_family(kernel, f"{anchor}-family") if drawn else None,
        heat=_heat(kernel, f"{anchor}-heat") if drawn else None,
        ulp=elements.ulp_distribution(kernel, f"{anchor}-ulp") if drawn else None,
        bias=elements.bias_map(kernel, f"{anchor}-bias") if drawn else None,
        patterns=_patterns(kernel),
        elements=[(array, pairs) for array, pairs in found if pairs],
        rows=rows,
        ranks=lambda column: _ranks(rows, column),
    )


def _heat(kernel: Kernel, prefix: str) -> tuple[Row, Drawing] | None:
    """The worst case of more than one row that kept a map of its elements."""
    kept = [row for row in kernel.judged if row.heat is not None and len(row.heat[2]) > 1]
    worst = max(kept, key=lambda row: numbers.severity(row.share), default=None)
    drawing = None if worst is None else elements.heat_map(worst, prefix)
    return None if worst is None or drawing is None else (worst, drawing)


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
    array, measure = column.rsplit(".", maxsplit=1)
    return numbers.ranks([None if (part := row.part(array)) is None else getattr(part, measure) for row in rows])


def _inverse_drawings(body: dict[str, Any] | None) -> list[Drawing]:
    """One drawing per precision and range of write strengths."""
    rows: Iterable[dict[str, Any]] = (body or {}).get("rows") or ()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((str(row["precision"]), str(row["beta"])), []).append(row)
    names = {"bf16": "BF16 operands", "bf16x3": "hi/lo operands"}
    drawings = [
        inverse_figures.level_map(group, f"{names.get(precision, precision)}, beta {beta}", f"inverse-{n}")
        for n, ((precision, beta), group) in enumerate(groups.items())
    ]
    return [drawing for drawing in drawings if drawing is not None]
