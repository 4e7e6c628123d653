"""From records to what a page shows: families, kernels and the answer; nothing counts that was not compared."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from reports.grid_gdn import INVERSE_SUBJECT, LAYER_SUBJECT
from reports.grid_ragged import RAGGED
from reports.item import ATTENTION, FLYWHEEL, INVERSE, LAYER
from reports.numbers import plural, severity, worst
from reports.rows import Element, Row, row_of
from verify.subjects import gdn
from verify.subjects.registry import BUILT_IN, PEERS, is_ours
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FAMILIES = {
    "ordinary": "bell-shaped data, lengths and head counts of everyday use",
    "adversarial": "built against this algorithm: jumps of the score, huge |v|, equal and hugely negative logits",
    "boundary": "sizes and values at the edge of what is supported",
    "non-finite": "NaN and infinities in visible, invisible and partly visible places",
    "trace": "query, key and value tensors captured from a real language model",
    "corpus": "worst cases kept from earlier searches",
    "fuzz": "found by a search",
    "open": "small inputs with a known answer",
    "features": "windows, soft cap, sinks, segments, other widths",
}
"""Families in the order of a page, and what is in them."""

OF_KEYS: dict[str, dict[str, str]] = {
    LAYER: {
        "ordinary": "random, near-duplicate and low-rank keys, mild decay, lengths of everyday use",
        "adversarial": "every family of keys with every way to draw write strengths; decays in turn, exp(g) = 0 too",
        "boundary": "packing off the 8-row grid, slots, initial states, NaN where nothing may be read, gates that "
        "overflow",
    },
    INVERSE: {
        "ordinary": "random keys",
        "adversarial": "repeated, near-duplicate, alternating, periodic and low-rank keys",
    },
}
"""The same of Gated DeltaNet."""

OTHERS = frozenset(name for name in (*BUILT_IN, *PEERS, *gdn.PEERS) if not is_ours(name))
"""Kernels that are compared with, not answered for."""

OURS = (FLYWHEEL, RAGGED, LAYER_SUBJECT, INVERSE_SUBJECT)
"""Our kernels in the order of a page; others follow as they come."""

SEARCHES = ("corpus", "fuzz")
"""Families whose cases a search has found."""

FAR_ULP = 8.0
"""An error of so many ulp calls for an explanation."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Some rows that are summed up together."""

    name: str
    rows: tuple[Row, ...]

    @functools.cached_property
    def verdicts(self) -> Counter[str]:
        """How many rows have each verdict."""
        return Counter(row.verdict for row in self.rows)

    def most(self, array: str, measure: str) -> float | None:
        """The worst of a measure; only what was judged counts."""
        return worst([getattr(part, measure) for row in self.rows if row.judged and (part := row.part(array))])

    @functools.cached_property
    def worst_row(self) -> Row | None:
        """The judged row with the worst share of the bound."""
        judged = [row for row in self.rows if row.judged and row.share is not None]
        return max(judged, key=lambda row: severity(row.share), default=None)

    @property
    def compared(self) -> int:
        """Elements compared with a reference."""
        return sum(row.compared for row in self.rows)

    @property
    def replays(self) -> int | None:
        """Query blocks replayed; None if no row says."""
        known = [row.replays for row in self.rows if row.replays is not None]
        return sum(known) if known else None

    @property
    def query_blocks(self) -> int:
        """Query blocks of the rows that say how many were replayed."""
        return sum(row.query_blocks or 0 for row in self.rows if row.replays is not None)

    @property
    def judged(self) -> tuple[Row, ...]:
        """Rows whose verdict is about errors."""
        return tuple(row for row in self.rows if row.judged)

    @functools.cached_property
    def biased(self) -> tuple[Row, ...]:
        """Rows with a bias alarm, the loudest first."""
        return tuple(sorted((row for row in self.rows if row.alarms), key=lambda row: row.lean, reverse=True))

    @property
    def beyond(self) -> tuple[Row, ...]:
        """Judged rows of which some element is at or beyond its bound, or of the wrong class."""
        return tuple(row for row in self.judged if row.share is not None and not row.share < 1.0)

    @property
    def bias_tests(self) -> int:
        """Arrays with bias statistics."""
        return sum(part.bias is not None for row in self.rows for part in row.parts)


@dataclasses.dataclass(frozen=True)
class Kernel(Group):
    """All rows of one subject."""

    @property
    def other(self) -> bool:
        """Whether it is a peer, whose failures are findings and not failures of the report."""
        return self.name in OTHERS

    @functools.cached_property
    def operation(self) -> str:
        """What it computes."""
        return self.rows[0].operation if self.rows else ATTENTION

    @property
    def attends(self) -> bool:
        """Whether it is attention, whose query blocks may be replayed."""
        return self.operation.startswith(ATTENTION)

    @property
    def packed(self) -> bool:
        """Whether its cases are packed batches."""
        return self.attends and any("sequences" in row.shape for row in self.rows)

    def family_words(self, name: str) -> str:
        """What is in a family; empty for one that is not known."""
        return OF_KEYS.get(self.operation, {}).get(name, FAMILIES.get(name, ""))

    @property
    def version(self) -> str:
        """Versions of its package, as the records say."""
        return ", ".join(sorted({row.version for row in self.rows if row.version}))

    @functools.cached_property
    def arrays(self) -> tuple[str, ...]:
        """Names of the compared arrays, the first one first."""
        return tuple(dict.fromkeys(part.array for row in self.rows for part in row.parts))

    def worst_of(self, families: Sequence[str], *, inside: bool) -> Row | None:
        """The row with the worst share among the families (or outside of them)."""
        rows = tuple(row for row in self.rows if (row.family in families) == inside)
        return Group("", rows).worst_row

    @property
    def searched(self) -> Row | None:
        """The worst that a search has found, of the cases it kept."""
        return self.worst_of(SEARCHES, inside=True)

    @property
    def drawn(self) -> Row | None:
        """The worst of what was not found by a search, or of everything if that is all there is."""
        return self.worst_of(SEARCHES, inside=False) or self.worst_row

    @property
    def growing(self) -> tuple[Row, ...]:
        """Judged rows of which some array's error certainly grows over tokens."""
        return tuple(row for row in self.judged if any(part.growth and part.growth.certain for part in row.parts))

    @property
    def growth_fits(self) -> int:
        """Arrays with a fit of growth over tokens."""
        return sum(
            part.growth is not None and part.growth.slope is not None for row in self.judged for part in row.parts
        )

    @property
    def verdict(self) -> str:
        """fail, backend unsound, nothing compared, or pass."""
        for bad in (Verdict.FAIL, Verdict.BACKEND_UNSOUND):
            if self.verdicts[bad]:
                return bad.value
        if not any(row.verdict in (Verdict.PASS, Verdict.NO_POWER) and row.compared for row in self.rows):
            return "nothing compared"
        return Verdict.PASS.value if self.verdicts[Verdict.PASS] else Verdict.NO_POWER.value

    @functools.cached_property
    def families(self) -> tuple[Group, ...]:
        """Rows by family, in the order of a page."""
        names = sorted({row.family for row in self.rows}, key=family_order)
        return tuple(Group(name, tuple(row for row in self.rows if row.family == name)) for name in names)

    def elements(self, array: str, limit: int) -> list[tuple[Row, Element]]:
        """The worst element of each of the worst cases, one array at a time."""
        found = [(row, part.worst) for row in self.judged if (part := row.part(array)) and part.worst is not None]
        return sorted(found, key=lambda pair: severity(pair[1].share), reverse=True)[:limit]

    @property
    def ulp_example(self) -> tuple[Row, Element] | None:
        """The ordinary case whose output is furthest in ulp, if that is far, and the element."""
        found = [
            (severity(part.ulp), row, part.worst_ulp)
            for row in self.judged
            if row.family == "ordinary" and (part := row.part("out")) and part.worst_ulp is not None
        ]
        size, row, element = max(found, key=lambda triple: triple[0], default=((0, 0.0), None, None))
        return None if row is None or element is None or size <= (1, FAR_ULP) else (row, element)

    @property
    def failures(self) -> tuple[Row, ...]:
        """Rows that make the kernel fail."""
        return tuple(row for row in self.rows if row.verdict in (Verdict.FAIL, Verdict.BACKEND_UNSOUND))

    @property
    def replayed(self) -> tuple[Row, ...]:
        """Rows with a replay, and a map of where."""
        return tuple(row for row in self.rows if row.replays and row.replay_map)


@dataclasses.dataclass(frozen=True)
class Absence:
    """Something that was not run, and why."""

    what: str
    why: str


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where some rows were measured.

    Attributes:
        facts: what the records say, dates and interpret modes apart.
        modes: how many rows ran in each interpret mode.
    """

    facts: Mapping[str, Any]
    modes: Mapping[str, int]

    @property
    def versions(self) -> Mapping[str, Any]:
        """Package versions by name."""
        versions = self.facts.get("versions")
        return versions if isinstance(versions, dict) else {}

    @property
    def count(self) -> int:
        """How many rows were measured there."""
        return sum(self.modes.values())

    @property
    def mode_words(self) -> str:
        """Such as "fast (309 cases), tpu (3 cases)"."""
        return ", ".join(f"{mode} ({plural(count, 'case')})" for mode, count in self.modes.items())


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that a page shows."""

    kernels: tuple[Kernel, ...]
    environments: tuple[Environment, ...]
    codes: tuple[str, ...]
    absences: tuple[Absence, ...]
    first_date: str
    last_date: str

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, kernel by kernel."""
        return tuple(row for kernel in self.kernels for row in kernel.rows)

    @property
    def empty(self) -> bool:
        """Nothing was compared."""
        return not any(row.compared for row in self.rows)

    @property
    def ok(self) -> bool:
        """Something was compared and every kernel stands."""
        good = (Verdict.PASS, Verdict.NO_POWER)
        return not self.empty and bool(self.answered_for) and all(one.verdict in good for one in self.answered_for)

    @property
    def answered_for(self) -> tuple[Kernel, ...]:
        """The kernels whose verdicts are the report's: all but peers, or peers where there is nothing else."""
        own = tuple(kernel for kernel in self.kernels if not kernel.other)
        return own or self.kernels

    @property
    def peers(self) -> tuple[Kernel, ...]:
        """The others."""
        return tuple(kernel for kernel in self.kernels if kernel not in self.answered_for)


def family_order(name: str) -> tuple[int, str]:
    """Known families in the order of a page, then the others by name."""
    names = list(FAMILIES)
    return (names.index(name) if name in names else len(names), name)


def build_report(records: Iterable[Mapping[str, Any]], absences: Sequence[Absence] = ()) -> Report:
    """What a page shows of some records; a record of the same case, bits and backend replaces an earlier one."""
    latest: dict[tuple[Any, ...], Row] = {}
    replaced: list[Row] = []
    for record in records:
        row = row_of(record)
        key = _identity(row)
        if key in latest:
            replaced.append(latest.pop(key))
        latest[key] = row
    finished = {_name(row) for row in latest.values() if not row.unfinished}
    rows = [row for row in latest.values() if not (row.unfinished and _name(row) in finished)]
    # Workers finish in any order: a page must not depend on it.
    subjects = sorted(dict.fromkeys(row.subject for row in rows), key=_place)
    kernels = tuple(
        Kernel(name, tuple(sorted((row for row in rows if row.subject == name), key=lambda row: row.order)))
        for name in subjects
    )
    dates = sorted(str(row.environment.get("date", "")) for row in rows if row.environment.get("date"))
    return Report(
        kernels=kernels,
        environments=_environments(rows),
        codes=tuple(sorted({row.code for row in rows if row.code})),
        absences=(*_absences(rows, replaced), *absences),
        first_date=dates[0] if dates else "",
        last_date=dates[-1] if dates else "",
    )


def _place(subject: str) -> int:
    name = subject.partition("[")[0]
    return OURS.index(name) if name in OURS else len(OURS)


def _identity(row: Row) -> tuple[Any, ...]:
    environment = row.environment
    where = tuple(str(environment.get(name)) for name in ("backend", "device_model", "interpret"))
    return (row.subject, row.family, row.case, row.sha256, *where)


def _name(row: Row) -> tuple[str, str, str, str]:
    return (row.subject, row.family, row.case, str(row.environment.get("interpret")))


def _environments(rows: Sequence[Row]) -> tuple[Environment, ...]:
    """Distinct environments, in the order in which they occur."""
    found: dict[str, tuple[Mapping[str, Any], Counter[str]]] = {}
    for row in rows:
        facts = {name: value for name, value in row.environment.items() if name not in ("date", "interpret")}
        _, modes = found.setdefault(json.dumps(facts, sort_keys=True, default=str), (facts, Counter()))
        modes[str(row.environment.get("interpret", "not stated"))] += 1
    return tuple(Environment(facts, dict(modes.most_common())) for facts, modes in found.values())


def _absences(rows: Sequence[Row], replaced: Sequence[Row]) -> Iterable[Absence]:
    """What the records themselves say was left out."""
    skipped: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict == Verdict.SKIPPED:
            skipped.setdefault(row.reason or "no reason was recorded", []).append(row.case)
    for reason, cases in skipped.items():
        yield Absence(_some(cases), f"skipped: {reason}")
    outside = [row.case for row in rows if row.verdict == Verdict.OUTSIDE_DOMAIN]
    if outside:
        yield Absence(_some(outside), "run, but outside the contract's domain on every row: no bound to judge them by")
    hollow = [row.case for row in rows if row.verdict in (Verdict.PASS, Verdict.NO_POWER) and not row.compared]
    if hollow:
        yield Absence(_some(hollow), "the record claims a verdict without a single compared element: not counted")
    if replaced:
        failed = sum(row.verdict == Verdict.FAIL for row in replaced)
        again = f"; {failed} of the earlier ones had failed" if failed else ""
        yield Absence(
            f"{len(replaced)} earlier records", f"a later record of the same bits on the same backend is shown{again}"
        )


MOST_NAMES = 6


def _some(cases: Sequence[str]) -> str:
    more = len(cases) - MOST_NAMES
    names = ", ".join(cases[:MOST_NAMES])
    return f"{names} and {more} more" if more > 0 else names
