"""What a lemma is: a statement, what it rests on, and a check that refutes it or says what was found."""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import TYPE_CHECKING

from proofs.checkers.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.checkers.outcome import Report


class LemmaRefuted(Exception):  # noqa: N818  the name states the finding, as in a verdict
    """A fact that a lemma needs does not hold for the constants as they stand."""


class Method(enum.StrEnum):
    """How the facts of a lemma were checked."""

    EXACT = "exact integers and rationals"
    BALLS = "ball arithmetic"
    EXHAUSTIVE = "exhaustive over a finite set of words"
    SMT = "SMT solver (z3)"
    INSTANCES = "exact instances (they confirm the argument in words, they are no proof of it)"


@dataclasses.dataclass(frozen=True)
class Assumption:
    """Something about the kernel or the machine that a lemma takes for granted.

    Attributes:
        text: the assumption, one sentence.
        covered_by: what watches over it: a test as `path::function`, or the refusal in the kernel as
            `module:function`, both within the source tree.
    """

    text: str
    covered_by: str


@dataclasses.dataclass(frozen=True)
class Lemma:
    """One named lemma; its argument, in words, is the docstring of `check`.

    Attributes:
        name: as the comments of the constants cite it.
        statement: what is proved, one line.
        rests_on: the constants it reads, as `proofs.constants` names them.
        assumptions: what it takes for granted.
        methods: how its facts are checked.
        check: raises `LemmaRefuted`, or returns what was found, one line.
    """

    name: str
    statement: str
    rests_on: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    methods: tuple[Method, ...]
    check: Callable[[], str]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of one check.

    Attributes:
        lemma: the lemma.
        established: whether every fact it needs was established in Python.
        finding: what was found, or the fact that failed.
        seconds: how long the check took.
        reports: what Coq and Gappa say of its formal counterparts, if it has any.
    """

    lemma: Lemma
    established: bool
    finding: str
    seconds: float
    reports: tuple[Report, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing refutes it: neither the check in Python nor a tool that was there to be asked."""
        return self.established and all(report.outcome is not Outcome.FAILED for report in self.reports)


def lemma(
    *,
    statement: str,
    rests_on: tuple[str, ...],
    methods: tuple[Method, ...],
    assumptions: tuple[Assumption, ...] = (),
) -> Callable[[Callable[[], str]], Lemma]:
    """Turn a check into the lemma of the same name."""

    def wrap(check: Callable[[], str]) -> Lemma:
        return Lemma(check.__name__, statement, rests_on, assumptions, methods, check)

    return wrap


def require(fact: bool, otherwise: str) -> None:  # noqa: FBT001  the fact is the point of the call
    """Refute the lemma unless the fact holds; `otherwise` says what is wrong, with the numbers.

    A comparison of balls that cannot be decided is False, so that it refutes.
    """
    if not fact:
        raise LemmaRefuted(otherwise)


def examine(subject: Lemma) -> Verdict:
    """Check one lemma.  Anything but `LemmaRefuted` is an error of the proof itself and propagates."""
    start = time.perf_counter()
    try:
        finding, established = subject.check(), True
    except LemmaRefuted as refuted:
        finding, established = str(refuted), False
    return Verdict(subject, established, finding, time.perf_counter() - start)
