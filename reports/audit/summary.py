"""From what the audit found to its tables."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from reports.audit.rules import RULES, Rule
from reports.numbers import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

OPERATIONS = {
    "attention": "Attention",
    "inverse": "Inverse of I + L, 64 tokens",
    "delta rule": "Gated delta rule",
}
GROUPS = {
    "planted": "a fault planted in flywheel.attention itself",
    "arithmetic": "one step of the textbook softmax done wrong",
    "results": "right results, spoilt afterwards",
    "definitions": "the exact answer to another question",
    "inverses": "no inverse, or one with a mistake",
    "recurrences": "the exact answer of another recurrence",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kernel by one rule: on how many inputs the mistake shows, and on how many of these the rule rejects it.

    For a right kernel: on how many inputs it was judged, and on how many the rule rejects it.
    """

    shown: int
    rejected: int
    ordinary_shown: int
    ordinary_rejected: int

    @property
    def passes(self) -> bool:
        """No input makes the rule reject it."""
        return self.rejected == 0

    @property
    def passes_ordinary(self) -> bool:
        """No ordinary input makes the rule reject it, although its mistake shows on one."""
        return self.ordinary_shown > 0 and self.ordinary_rejected == 0


@dataclasses.dataclass(frozen=True)
class Line:
    """One kernel."""

    group: str
    name: str
    words: str
    cells: tuple[Cell, ...]

    @property
    def shown(self) -> int:
        """Inputs on which its mistake shows."""
        return self.cells[0].shown

    @property
    def ordinary_shown(self) -> int:
        """Ordinary inputs among them."""
        return self.cells[0].ordinary_shown


@dataclasses.dataclass(frozen=True)
class Total:
    """One rule over all kernels of an operation."""

    rule: Rule
    wrong: int
    passed: int
    wrong_ordinary: int
    passed_ordinary: int
    right: int
    rejected: int


@dataclasses.dataclass(frozen=True)
class Table:
    """One operation.

    Attributes:
        wrong: wrong kernels whose mistake shows on some input, group by group.
        right: right kernels.
        hidden: names of wrong kernels whose mistake shows on no input here.
        inputs: names of the inputs, ordinary ones first, with whether they are ordinary.
    """

    operation: str
    rules: tuple[Rule, ...]
    wrong: tuple[Line, ...]
    right: tuple[Line, ...]
    hidden: tuple[str, ...]
    inputs: tuple[tuple[str, bool], ...]

    @property
    def title(self) -> str:
        """Name of the operation."""
        return OPERATIONS.get(self.operation, self.operation)

    @property
    def groups(self) -> dict[str, list[Line]]:
        """Wrong kernels by group."""
        found: dict[str, list[Line]] = {}
        for line in self.wrong:
            found.setdefault(line.group, []).append(line)
        return found

    @property
    def totals(self) -> list[Total]:
        """Each rule over all kernels."""
        found = []
        for n, rule in enumerate(self.rules):
            cells = [line.cells[n] for line in self.wrong]
            ordinary = [cell for cell in cells if cell.ordinary_shown]
            found.append(
                Total(
                    rule,
                    wrong=len(cells),
                    passed=sum(cell.passes for cell in cells),
                    wrong_ordinary=len(ordinary),
                    passed_ordinary=sum(cell.passes_ordinary for cell in ordinary),
                    right=len(self.right),
                    rejected=sum(not line.cells[n].passes for line in self.right),
                )
            )
        return found


def tables(bodies: Iterable[Mapping[str, Any]]) -> list[Table]:
    """The audit's tables, one per operation that was audited."""
    by_operation: dict[str, list[Mapping[str, Any]]] = {}
    for body in bodies:
        by_operation.setdefault(str(body["operation"]), []).append(body)
    known = [name for name in OPERATIONS if name in by_operation]
    return [_table(name, by_operation[name]) for name in [*known, *sorted(set(by_operation) - set(known))]]


def _table(operation: str, bodies: Sequence[Mapping[str, Any]]) -> Table:
    rules = tuple(rule for rule in RULES if operation == "inverse" or not rule.inverse_only)
    inputs: dict[str, bool] = {}
    for body in bodies:
        inputs |= {str(name): bool(one["ordinary"]) for name, one in body["inputs"].items()}
    lines = {True: list[Line](), False: list[Line]()}
    hidden = []
    for body in sorted(bodies, key=lambda body: _order(str(body["group"]))):
        line = _line(body, rules)
        if line.shown:
            lines[bool(body["right"])].append(line)
        else:
            hidden.append(line.name)
    ordered = sorted(inputs.items(), key=lambda pair: not pair[1])
    return Table(operation, rules, tuple(lines[False]), tuple(lines[True]), tuple(hidden), tuple(ordered))


def _order(group: str) -> int:
    return list(GROUPS).index(group) if group in GROUPS else len(GROUPS)


def _line(body: Mapping[str, Any], rules: Sequence[Rule]) -> Line:
    shown = [one for one in body["inputs"].values() if one["shows"]]
    ordinary = [one for one in shown if one["ordinary"]]

    def rejected(ones: Sequence[Mapping[str, Any]], rule: Rule) -> int:
        return sum(rule.key not in one["accepted"] for one in ones)

    cells = [Cell(len(shown), rejected(shown, rule), len(ordinary), rejected(ordinary, rule)) for rule in rules]
    return Line(str(body["group"]), str(body["name"]), str(body["words"]), tuple(cells))


def headlines(found: Sequence[Table]) -> list[str]:
    """What the audit says, a sentence per operation."""
    parts = []
    for table in found:
        public = [total for total in table.totals if total.rule.accepts is not None]
        worst = max(public, key=lambda total: total.passed_ordinary / max(total.wrong_ordinary, 1), default=None)
        own = next((total for total in table.totals if total.rule.key == "contract"), None)
        if worst is None or own is None:
            continue
        parts.append(
            f"{table.title}: of {plural(worst.wrong_ordinary, 'wrong kernel')} whose mistake shows on ordinary data, "
            f"“{worst.rule.name}” lets {worst.passed_ordinary} pass, the contract {own.passed_ordinary}."
        )
    return parts
