"""Deciding with ball arithmetic what a float64 reference leaves open."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import flint
import numpy as np
from flint import arb

from verify.attention.oracle_arb import MAX_PRECISION, RELATIVE, attention_rows, max_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.measures import Errors
    from verify.verdict import Decision

# Radii asked for, in turn.  A distance that equals its bound to within the last is a tie: it counts as within.
RADII = (RELATIVE, RELATIVE**2, RELATIVE**4)

WHOLE_HEAD = -1
"""Stands for the row of a number that a head has only one of."""


def settle(
    problem: AttentionProblem, found: Errors, decision: Decision, name: str, reference: Reference
) -> tuple[Decision, int, int]:
    """Decide the open elements of an array by ball arithmetic.

    Args:
        problem: the inputs.
        found: the array's errors; `out` has 4 axes, `lse` 3, `max_logit` 3 (rows) or 2 (heads).
        decision: what float64 has decided.
        name: out, lse or max_logit.
        reference: what float64 gave; it says which rows may hold the largest logit of a head.

    Returns:
        The decision with nothing left open, the number of rows computed, and the number of ties.
    """
    settled = dataclasses.replace(decision, wrong=decision.wrong.copy(), open=np.zeros_like(decision.open))
    rows = ties = 0
    for (batch, head), by_row in _by_head(found, decision.open):
        if name == "max_logit":
            contenders = reference.contenders(batch, head) if WHOLE_HEAD in by_row else []
            balls = functools.partial(_largest, problem, (batch, head), contenders)
        else:
            balls = functools.partial(_lanes, problem, (batch, head), of_out=name == "out")
        rows += len(by_row)
        ties += _settle_head(by_row, found, settled, balls)
    return settled, rows, ties


def _within(got: float, exact: arb, limit: float) -> bool | None:
    """Whether |got - exact| <= limit; None if the ball is too wide to tell."""
    with flint.ctx.workprec(MAX_PRECISION):  # the difference must add no rounding to speak of
        distance, bound = abs(arb(got) - exact), arb(limit)
    if distance <= bound:
        return True
    return False if distance > bound else None


def _by_head(found: Errors, chosen: np.ndarray) -> Iterator[tuple[tuple[int, int], dict[int, list[int]]]]:
    """(batch, head), then flat positions by row, or of one number for the whole head."""
    heads: dict[tuple[int, int], dict[int, list[int]]] = {}
    for position in np.flatnonzero(chosen):
        batch, head, row, *_ = (*found.index(int(position)), WHOLE_HEAD)
        heads.setdefault((batch, head), {}).setdefault(row, []).append(int(position))
    yield from heads.items()


def _settle_head(
    by_row: dict[int, list[int]],
    found: Errors,
    decision: Decision,
    balls: Callable[[list[int], float], list[list[arb]]],
) -> int:
    """Set `wrong` of the decision at the given positions; returns how many are ties.

    `balls` gives for rows and a relative radius the balls of each row: its lanes, or one number.
    """
    pending = {row: list(positions) for row, positions in by_row.items()}
    for relative in RADII:
        answers = balls(list(pending), relative)
        for (row, positions), answer in zip(list(pending.items()), answers, strict=True):
            pending[row] = []
            for position in positions:
                lane = found.index(position)[3:]
                exact = answer[lane[0] if lane else 0]
                within = _within(float(found.wide[position]), exact, float(decision.limit[position]))
                if within is None:
                    pending[row].append(position)
                else:
                    decision.wrong[position] = not within
        pending = {row: positions for row, positions in pending.items() if positions}
        if not pending:
            return 0
    return sum(len(positions) for positions in pending.values())


def _lanes(
    problem: AttentionProblem, head: tuple[int, int], rows: list[int], relative: float, *, of_out: bool
) -> list[list[arb]]:
    """The output's lanes of some rows, or their LSE."""
    answers = attention_rows(problem, *head, rows, relative=relative)
    return [out if of_out else [lse] for out, lse in answers]


def _largest(
    problem: AttentionProblem, head: tuple[int, int], contenders: list[int], rows: list[int], relative: float
) -> list[list[arb]]:
    """The largest logit of some rows, or of the whole head by the rows that may hold it."""
    balls = max_logits(problem, *head, contenders or rows, relative=relative)
    return [[functools.reduce(arb.max, balls)]] if contenders else [[ball] for ball in balls]
