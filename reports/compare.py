"""What changed between two runs: new failures, cases that are worse by more than noise, versions.

**Noise.**  Between two runs of the same case, errors may move although nothing got worse: another order of sums,
another exp2, other roundings.  Then either run's rows are as good as the other's: put together, their largest shares of
the bound stand in any order with equal probability.  That the largest k of the 2n rows all lie in the second run has

    P = C(2n - k, n) / C(2n, n) = prod_{i < k} (n - i) / (2n - i) <= 2^-k,

whatever the distribution of errors (Rosenbaum's test).  With k = `profile.RANK` = 30 that is below the suite's
false-alarm rate of 1e-9.  So an array is **worse** if its k-th largest row share exceeds the largest of the earlier
run, and **better** the other way round; rows are independent because each has its own weights and sums.  A record keeps
both numbers.  An array with fewer than k rows cannot tell on its own.

**Many cases.**  Over the ordinary cases of a kernel, which are drawn independently, signs of differences are fair coins
without a change: a kernel is worse on ordinary data if as many of them use more of the bound as a fair coin shows with
a probability of at most 1e-9 (sign test).

**Same code.**  The same sources, versions and backend give the same bits; a difference then is no noise but
irreproducible, whichever way it goes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from scipy import stats

from reports import sources
from reports.model import build_report
from reports.numbers import plural, severity, show_share
from reports.sources import SourceError
from verify.bias import FALSE_ALARM_RATE
from verify.records import decode_number, encode_number
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from reports.model import Report
    from reports.rows import Row

FORMAT = "flywheel-run/1"
GOOD = (Verdict.PASS.value, Verdict.NO_POWER.value)
BAD = (Verdict.FAIL.value, Verdict.BACKEND_UNSOUND.value)

NEW_FAILURE, WORSE, LOST, IRREPRODUCIBLE = "new failure", "worse", "lost", "irreproducible"
FIXED, BETTER = "fixed", "better"
KINDS = (NEW_FAILURE, IRREPRODUCIBLE, WORSE, LOST, FIXED, BETTER)
FAILING = (NEW_FAILURE, IRREPRODUCIBLE, WORSE)
WHOLE_KERNEL = "every case"
"""In the place of a case's name, where the whole kernel is meant."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of one case: its largest share, and its k-th largest row share (None if it has fewer rows)."""

    share: float | None
    nth_row: float | None

    def to_json(self) -> list[float | str | None]:
        """Both numbers."""
        return [_coded(self.share), _coded(self.nth_row)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of a run."""

    verdict: str
    digest: str
    arrays: Mapping[str, Array]

    @property
    def share(self) -> float | None:
        """The worst of its arrays."""
        return max((array.share for array in self.arrays.values()), key=severity, default=None)


Key = tuple[str, str, str, str]
"""Kernel, family, case, interpret mode."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as far as comparisons and trends need it; what a site keeps of it.

    Attributes:
        date: of its last record.
        code: digests of the measured sources.
        versions: packages, backend, device model, and the versions of the judged kernels.
        kernels: per kernel verdict, worst shares and counts, as a site's trends show them.
        cases: every case.
    """

    date: str
    code: str
    versions: Mapping[str, str]
    kernels: tuple[Mapping[str, Any], ...]
    cases: Mapping[Key, Case]

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        cases = [
            [*key, case.verdict, case.digest, {name: array.to_json() for name, array in case.arrays.items()}]
            for key, case in self.cases.items()
        ]
        return {
            "format": FORMAT,
            "date": self.date,
            "code": self.code,
            "versions": dict(self.versions),
            "kernels": list(self.kernels),
            "cases": cases,
        }

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Run:
        """A run that was kept.

        Raises:
            ValueError: another format.
        """
        if body.get("format") != FORMAT:
            message = f"format must be {FORMAT}, got {body.get('format')!r}"
            raise ValueError(message)
        cases: dict[Key, Case] = {}
        for kernel, family, name, mode, verdict, digest, arrays in body["cases"]:
            pairs = {array: Array(decode_number(share), decode_number(nth)) for array, (share, nth) in arrays.items()}
            cases[kernel, family, name, mode] = Case(verdict, digest, pairs)
        return Run(body["date"], body["code"], body["versions"], tuple(body["kernels"]), cases)

    @property
    def digest(self) -> str:
        """SHA-256 of what it holds."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def verdict(self) -> str:
        """Of the kernels that the run answers for."""
        own = [str(kernel["verdict"]) for kernel in self.kernels if not kernel["other"]]
        own = own or [str(kernel["verdict"]) for kernel in self.kernels]
        if not own:
            return "nothing compared"
        bad = [verdict for verdict in own if verdict not in GOOD]
        return bad[0] if bad else Verdict.PASS.value


def _coded(x: float | None) -> float | str | None:
    return None if x is None else encode_number(x)


def run_of(report: Report) -> Run:
    """What is kept of a report."""
    versions: dict[str, set[str]] = {}
    for place in report.environments:
        for name, value in (*place.versions.items(), *((n, place.facts.get(n)) for n in ("backend", "device_model"))):
            if value is not None:
                versions.setdefault(str(name), set()).add(str(value))
    for kernel in report.kernels:
        if kernel.version:
            versions.setdefault(kernel.name, set()).add(kernel.version)
    return Run(
        date=report.last_date,
        code=" ".join(report.codes),
        versions={name: ", ".join(sorted(values)) for name, values in sorted(versions.items())},
        kernels=tuple(_kernel(kernel) for kernel in report.kernels),
        cases={_key(row): _case(row) for row in report.rows},
    )


def _kernel(kernel: Any) -> dict[str, Any]:  # noqa: ANN401  reports.model.Kernel
    shares = {array: _coded(kernel.most(array, "share")) for array in kernel.arrays[:2]}
    return {
        "name": kernel.name,
        "other": kernel.other,
        "verdict": kernel.verdict,
        "shares": {array: share for array, share in shares.items() if share is not None},
        "judged": len(kernel.judged),
        "failures": len(kernel.failures),
        "replays": kernel.replays,
        "query_blocks": kernel.query_blocks,
    }


def _key(row: Row) -> Key:
    return (row.subject, row.family, row.case, str(row.environment.get("interpret", "")))


def _case(row: Row) -> Case:
    arrays = {part.array: Array(part.share, None if part.nth_row is None else part.nth_row[1]) for part in row.parts}
    return Case(row.verdict, row.sha256[:16], arrays)


def read_run(source: Path) -> Run:
    """The run of a report's directory or a records file.

    Raises:
        SourceError: there are no records, or they break their format.
    """
    try:
        return run_of(build_report(sources.read([source]).records))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        if isinstance(error, SourceError):
            raise
        message = f"a record of {source} breaks its format: {error!r}"
        raise SourceError(message) from error


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that changed: a kind of KINDS, where, and the numbers in words."""

    kind: str
    kernel: str
    family: str
    case: str
    words: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Run A against run B.

    Attributes:
        changes: the worst kinds first.
        versions: (name, before, after) that differ.
        common: cases that could be compared.
        added: cases of B alone.
        other_bits: cases of one name that build other bits, which say nothing about each other.
        tests: how many could have raised a false alarm, each with a probability of at most 1e-9.
    """

    changes: tuple[Change, ...]
    versions: tuple[tuple[str, str, str], ...]
    common: int
    added: int
    other_bits: int
    tests: int

    @property
    def counts(self) -> dict[str, int]:
        """Changes by kind."""
        return {kind: sum(change.kind == kind for change in self.changes) for kind in KINDS}

    @property
    def ok(self) -> bool:
        """Something was compared, nothing fails anew or is worse, and no kernel is gone."""
        gone = any(change.kind == LOST and change.case == WHOLE_KERNEL for change in self.changes)
        return self.common > 0 and not gone and not any(change.kind in FAILING for change in self.changes)

    @property
    def words(self) -> str:
        """The result in a sentence."""
        counts = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        rest = "nothing else changed" if counts else "nothing changed"
        extra = [plural(len(self.versions), "other version")] if self.versions else []
        extra += [plural(self.added, "new case")] if self.added else []
        extra += [f"{plural(self.other_bits, 'case')} with other bits, not compared"] if self.other_bits else []
        return f"{plural(self.common, 'case')} in common: {', '.join([*counts, *extra]) or rest}"


def compare(first: Run, second: Run) -> Comparison:
    """What changed from the first run to the second; see the module docstring for the rule."""
    versions = tuple(_versions(first, second))
    same = not versions and bool(first.code) and first.code == second.code
    changes: list[Change] = []
    common = other_bits = tests = 0
    gone = {key[0] for key in first.cases} - {key[0] for key in second.cases}
    changes += [Change(LOST, kernel, "", WHOLE_KERNEL, "no record of it in the later run") for kernel in sorted(gone)]
    moved: dict[str, list[int]] = {}
    for key, before in first.cases.items():
        after = second.cases.get(key)
        if key[0] in gone:
            continue
        if after is None:
            if before.verdict in (*GOOD, *BAD):
                changes.append(_change(LOST, key, "no record of it in the later run"))
            continue
        if before.digest and after.digest and before.digest != after.digest:
            other_bits += 1
            continue
        common += 1
        tests += len(before.arrays)
        changes += _changed(key, before, after, same=same)
        if key[1] == "ordinary" and before.share is not None and after.share is not None:
            order = (severity(after.share) > severity(before.share)) - (severity(after.share) < severity(before.share))
            moved.setdefault(key[0], []).append(order)
    if not same:
        changes += _signs(moved)
        tests += len(moved)
    changes.sort(key=lambda change: (KINDS.index(change.kind), change.kernel, change.family, change.case))
    added = len(second.cases.keys() - first.cases.keys())
    return Comparison(tuple(changes), versions, common, added, other_bits, tests)


def _versions(first: Run, second: Run) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*first.versions, *second.versions}):
        before, after = first.versions.get(name, "none"), second.versions.get(name, "none")
        if before != after:
            yield name, before, after
    if first.code != second.code:
        yield "measured sources", first.code[:12] or "unknown", second.code[:12] or "unknown"


def _change(kind: str, key: Key, words: str) -> Change:
    return Change(kind, key[0], key[1], key[2] + (" (races checked)" if key[3] == "tpu" else ""), words)


def _changed(key: Key, before: Case, after: Case, *, same: bool) -> Iterable[Change]:
    was, now = show_share(before.share), show_share(after.share)
    if after.verdict in BAD and before.verdict not in BAD:
        return [_change(NEW_FAILURE, key, f"{before.verdict} became {after.verdict}, share {was} -> {now}")]
    if before.verdict in BAD and after.verdict in GOOD:
        return [_change(FIXED, key, f"{before.verdict} became {after.verdict}, share {was} -> {now}")]
    if before.verdict in GOOD and after.verdict not in (*GOOD, *BAD):
        return [_change(LOST, key, f"{before.verdict} became {after.verdict}")]
    if same and (before.verdict != after.verdict or before.arrays != after.arrays) and _differs(before, after):
        return [_change(IRREPRODUCIBLE, key, f"same code and versions, share {was} -> {now}")]
    found = []
    for name in before.arrays.keys() & after.arrays.keys():
        old, new = before.arrays[name], after.arrays[name]
        words = f"{name}: share {show_share(old.share)} -> {show_share(new.share)}"
        if new.nth_row is not None and severity(new.nth_row) > severity(old.share):
            found.append(_change(WORSE, key, words))
        elif old.nth_row is not None and severity(old.nth_row) > severity(new.share):
            found.append(_change(BETTER, key, words))
    return found


def _differs(before: Case, after: Case) -> bool:
    """Beyond NaN, which differs from itself."""
    names = before.arrays.keys() | after.arrays.keys()
    pairs = [(before.arrays.get(name), after.arrays.get(name)) for name in names]
    return before.verdict != after.verdict or any(
        old is None or new is None or severity(old.share) != severity(new.share) for old, new in pairs
    )


def _signs(moved: Mapping[str, list[int]]) -> Iterator[Change]:
    for kernel, orders in moved.items():
        worse, better = orders.count(1), orders.count(-1)
        for kind, count in ((WORSE, worse), (BETTER, better)):
            if worse + better and stats.binom.sf(count - 1, worse + better, 0.5) < FALSE_ALARM_RATE:
                direction = "more" if kind == WORSE else "less"
                words = f"{count} of {worse + better} ordinary cases that moved use {direction} of the bound"
                yield Change(kind, kernel, "ordinary", WHOLE_KERNEL, words)
