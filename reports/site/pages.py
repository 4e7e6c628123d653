"""The pages of a site."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from reports import numbers
from reports.compare import KINDS, Change, compare
from reports.figures import trends
from reports.page import environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reports.compare import Comparison, Run
    from reports.site.store import Entry

MOST_CHANGES = 200
MOST_RANGES = 12


@dataclasses.dataclass(frozen=True)
class Spread:
    """One case that differs from some earlier run: what kind, since which runs, and the latest numbers in words.

    Attributes:
        runs: numbers of the runs, ascending.
    """

    change: Change
    runs: tuple[int, ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The runs as ranges."""
        found: list[tuple[int, int]] = []
        for number in self.runs:
            if found and found[-1][1] == number - 1:
                found[-1] = (found[-1][0], number)
            else:
                found.append((number, number))
        return found

    @property
    def data(self) -> str:
        """The ranges for the page's script."""
        return ",".join(f"{a}-{b}" for a, b in self.ranges)

    @property
    def words(self) -> str:
        """The ranges to read."""
        texts = [f"#{a}" if a == b else f"#{a} to #{b}" for a, b in self.ranges[-MOST_RANGES:]]
        more = len(self.ranges) - MOST_RANGES
        return ", ".join(texts) + (f" and {numbers.plural(more, 'earlier range')}" if more > 0 else "")


def changes_page(
    number: int, name: str, run: Run, earlier: Iterable[tuple[Entry, Run]], *, title: str
) -> tuple[str, Comparison | None]:
    """What changed from each earlier run to this one, and the comparison with the latest of them."""
    compared = [(entry, compare(other, run)) for entry, other in earlier]
    spreads: dict[tuple[str, str, str, str], list[tuple[int, Change]]] = {}
    for entry, found in compared:
        for change in found.changes:
            spreads.setdefault((change.kind, change.kernel, change.family, change.case), []).append(
                (entry.number, change)
            )
    cases = [Spread(pairs[-1][1], tuple(n for n, _ in pairs)) for pairs in spreads.values()]
    cases.sort(key=lambda spread: (KINDS.index(spread.change.kind), -len(spread.runs), spread.change.kernel))
    text = (
        environment()
        .get_template("changes.html.j2")
        .render(
            number=number,
            name=name,
            run=run,
            title=title,
            compared=compared[::-1],
            latest=compared[-1] if compared else None,
            cases=cases,
            kinds=KINDS,
            most=MOST_CHANGES,
        )
    )
    return text, compared[-1][1] if compared else None


def index_page(entries: Sequence[Entry], archives: Iterable[tuple[str, int, int]], *, shown: int, title: str) -> str:
    """The index: latest verdict, trends, the latest `shown` runs, links to archives."""
    return (
        environment()
        .get_template("index.html.j2")
        .render(
            entries=entries[-shown:][::-1],
            all_entries=entries,
            latest=entries[-1],
            archives=list(archives),
            trends=trends.of_entries(entries),
            title=title,
            kinds=KINDS,
        )
    )


def archive_page(entries: Sequence[Entry], *, title: str) -> str:
    """Runs that the index no longer lists."""
    return environment().get_template("archive.html.j2").render(entries=entries[::-1], title=title, kinds=KINDS)
