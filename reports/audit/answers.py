"""What is judged: an input with its exact result and its bound, and a kernel's answers to inputs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.audit.rules import BIAS, CONTRACT, compared, of
from verify.measures import ComparisonError, errors, measure
from verify.verdict import decide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from verify.measures import Errors
    from verify.verdict import Decision

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Due:
    """One array of an input's exact result.

    Attributes:
        want: the exact result.
        doubt: its proved error.
        limit: the contract's bound.
        baseline: what a plain implementation gives.
        where: the elements that the contract speaks of; None: all.
    """

    want: np.ndarray
    doubt: np.ndarray
    limit: np.ndarray
    baseline: np.ndarray
    where: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """One input.

    Attributes:
        operation: attention, inverse or delta rule.
        name: of the input.
        words: what it is.
        ordinary: whether it is what public tests draw: bell-shaped, no structure.
        problem: what a kernel is given.
        due: the exact result, by array.
        matrix: T, if the operation inverts it.
        settle: decides what the float64 reference leaves open; None leaves it open, in favour of the kernel.
    """

    operation: str
    name: str
    words: str
    ordinary: bool
    problem: Any
    due: Mapping[str, Due]
    matrix: np.ndarray | None = None
    settle: Callable[[Errors, Decision, str], Decision] | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel whose rightness is known.

    Attributes:
        operation: what it computes.
        name: shown in the table.
        right: whether it is right.
        group: rows of one group stand together.
        words: what is wrong, or why it is right.
        answer: arrays for an input; None if it does not take it.
        usual: what it would answer without its mistake; None: the exact result, rounded.
    """

    operation: str
    name: str
    right: bool
    group: str
    words: str
    answer: Callable[[Asked], Arrays | None]
    usual: Callable[[Asked], Arrays] | None = None


def verdicts(asked: Asked, answer: Arrays) -> dict[str, bool]:
    """Which rules accept an answer: a rule accepts it if it accepts every array."""
    found = {rule.key: True for rule in of(asked.operation)}
    with np.errstate(all="ignore"):
        for name, got in answer.items():
            due = asked.due[name]
            sides = compared(got, due.want, due.baseline, asked.matrix)
            for rule in of(asked.operation):
                if rule.accepts is not None and sides.got.size:
                    found[rule.key] &= rule.accepts(sides)
            within, fair = _contract(asked, name, got)
            found[CONTRACT] &= within
            found[BIAS] &= within and fair
    return found


def _contract(asked: Asked, name: str, got: np.ndarray) -> tuple[bool, bool]:
    due = asked.due[name]
    try:
        found = errors(got, due.want, nan_matches=True, where=due.where)
    except ComparisonError:
        return True, True
    decision = decide(found, due.limit, due.doubt)
    if decision.open.any() and asked.settle is not None:
        decision = asked.settle(found, decision, name)
    bias = measure(found, due.limit, lanes=name != "lse").bias
    return not decision.wrong.any(), not asked.ordinary or bias is None or not bias.alarm


def shows(asked: Asked, answer: Arrays, usual: Arrays | None) -> bool:
    """Whether an answer differs from the usual one, or (without one) from the exact result beyond rounding it."""
    for name, got in answer.items():
        if usual is not None:
            if got.tobytes() != usual[name].tobytes():
                return True
            continue
        due = asked.due[name]
        with np.errstate(invalid="ignore"):
            rounded = due.want.astype(got.dtype).astype(np.float64)
            differs = ~((got.astype(np.float64) == rounded) | (np.isnan(rounded) & np.isnan(got.astype(np.float64))))
        if differs.any():
            return True
    return False


def worst_share(asked: Asked, answer: Arrays) -> float:
    """The largest share of the bound among the arrays; NaN or infinity where classes differ."""
    worst = 0.0
    for name, got in answer.items():
        due = asked.due[name]
        try:
            found = errors(got, due.want, nan_matches=True, where=due.where)
        except ComparisonError:
            continue
        share = measure(found, due.limit).share
        if share is not None and not worst >= share.value:
            worst = share.value
        if np.isnan(worst):
            break
    return worst
