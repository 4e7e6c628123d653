"""The searches beyond Hypothesis': variation of elites, local search from them, and making a failing case smaller.

Each is an iterator of cases that is told what each case was worth before it makes the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.outcome import severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fuzz.case import Case
    from fuzz.hunts import Moves
    from fuzz.outcome import Outcome
    from fuzz.tally import Elite

PATIENCE = 40
"""Local changes in a row without a gain before the search starts from another elite."""

MOST_REDUCTIONS = 400

STARTS = 8
"""Elites that a round starts from: half of them the worst of all, half from random cells."""


def starts(archive: Mapping[str, Elite], seed: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    """Elites of a hunt to start a round from."""
    if not archive:
        return ()
    rng = np.random.default_rng(seed)
    # The first word of a cell is its shape or precision: numbers of different ones do not compare.
    arenas = sorted({cell.split(" ", 1)[0] for cell in archive})
    arena = arenas[int(rng.integers(len(arenas)))]
    cells = [cell for cell in archive if cell.split(" ", 1)[0] == arena]
    best = sorted(cells, key=lambda cell: -severity(archive[cell].share))
    worst = list(_unique(archive, best).values())[: STARTS // 2]
    others = list(_unique(archive, [*rng.permutation(cells)]).values())[: STARTS // 2]
    return (*worst, *others)


def _unique(archive: Mapping[str, Elite], cells: list[str]) -> dict[str, dict[str, Any]]:
    """The cases of some cells, each once."""
    return {str(archive[cell].spec["sha256"]): archive[cell].spec for cell in cells}


class Evolution:
    """Variations of elites; what beats its parent becomes one."""

    def __init__(self, moves: Moves, starts: Sequence[Case], seed: int, cases: int) -> None:
        self.moves, self.cases = moves, cases
        self.rng = np.random.default_rng(seed)
        self.pool = [(start, -np.inf) for start in starts]
        self.parent, self.child = 0, starts[0]

    def __iter__(self) -> Iterator[Case]:
        for _ in range(self.cases):
            self.parent = int(self.rng.integers(len(self.pool)))
            other = self.pool[int(self.rng.integers(len(self.pool)))][0]
            self.child = self.moves.vary(self.pool[self.parent][0], other, self.rng)
            yield self.child

    def learn(self, outcome: Outcome | None) -> None:
        """What the case that was just given is worth; None: outside the domain."""
        if outcome is not None and outcome.root is None and severity(outcome.goal) > self.pool[self.parent][1]:
            self.pool[self.parent] = (self.child, severity(outcome.goal))


class Climb:
    """Local changes from one elite after the other, each kept if it is no worse."""

    def __init__(self, moves: Moves, starts: Sequence[Case], seed: int, cases: int, ways: Sequence[str]) -> None:
        self.moves, self.starts, self.cases, self.ways = moves, list(starts), cases, tuple(ways)
        self.rng = np.random.default_rng(seed)
        self.best: tuple[Case, Outcome] | None = None
        self.tried = starts[0]
        self.failures = 0

    def __iter__(self) -> Iterator[Case]:
        for number in range(self.cases):
            if self.best is None or self.failures > PATIENCE:
                self.best, self.failures = None, 0
                self.tried = self.starts[number % len(self.starts)]
            else:
                self.tried = self.moves.climb(*self.best, self.rng, self.ways)
            yield self.tried

    def learn(self, outcome: Outcome | None) -> None:
        """What the case that was just given is worth; None: outside the domain."""
        if outcome is None or outcome.root is not None:
            self.failures += 1
            return
        gain = self.best is None or severity(outcome.goal) >= severity(self.best[1].goal)
        self.failures = (
            0 if self.best is None or severity(outcome.goal) > severity(self.best[1].goal) else self.failures + 1
        )
        if gain:
            self.best = (self.tried, outcome)


def reduced(
    case: Case, outcome: Outcome, moves: Moves, judge: Callable[[Case], Outcome | None]
) -> tuple[Case, Outcome]:
    """A smaller case with the same root: leave out and simplify, as long as it fails the same way."""
    budget = MOST_REDUCTIONS
    smaller = True
    while smaller and budget > 0:
        smaller = False
        for candidate in moves.simpler(case):
            budget -= 1
            if budget <= 0:
                break
            if candidate.key == case.key or candidate.size > case.size:
                continue
            found = judge(candidate)
            if found is not None and found.root == outcome.root:
                case, outcome, smaller = candidate, found, True
                break
    return case, outcome
