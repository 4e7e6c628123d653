"""Whether a bound can tell the right answer from trivial ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn import oracle_float64
from verify.gdn.problem import DeltaRuleProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verify.gdn.judge import Bound
    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference


def powerless(problem: Problem, reference: GdnReference, bound: Bound) -> list[str]:
    """Names of wrong answers that lie within the bound everywhere; one that is the right answer does not count."""
    return [name for name, out, state in _trivial(problem, reference) if _within(reference, bound, out, state)]


def _within(reference: GdnReference, bound: Bound, out: np.ndarray, state: np.ndarray) -> bool:
    pairs = ((out, reference.out, bound.out), (state, reference.state, bound.state))
    different = False
    for got, want, limit in pairs:
        seen = np.isfinite(want)
        if not (np.abs(got - want)[seen] <= limit[seen]).all():
            return False
        different |= bool((np.abs(got - want)[seen] > 2.0**-20 * np.abs(want)[seen]).any())
    return different


def _trivial(problem: Problem, reference: GdnReference) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Names, outputs and states."""
    before = np.where(np.isfinite(problem.state), problem.state.astype(np.float64), 0.0)
    yield "zeros, with the states as they were", np.zeros_like(reference.out), before
    if reference.out.shape[1] > 1:
        yield (
            "the next head's answer",
            np.roll(reference.out, 1, axis=1),
            np.where(reference.state == before, before, np.roll(reference.state, 1, axis=1)),
        )
    yield "the previous token's output", np.roll(reference.out, 1, axis=0), reference.state
    for name, changed in _changed(problem):
        found = oracle_float64.gdn_chunked(changed)
        yield name, found.out, found.state


def _changed(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The right answers to wrong questions."""
    fresh = np.zeros(problem.sequences.count, dtype=bool)
    yield (
        "the answer without initial states",
        dataclasses.replace(problem, sequences=dataclasses.replace(problem.sequences, has_initial=fresh)),
    )
    if isinstance(problem, DeltaRuleProblem):
        yield "the answer without decay", dataclasses.replace(problem, g=None)
        yield "the answer with beta = 0", dataclasses.replace(problem, beta=np.zeros_like(problem.beta))
        return
    yield "the answer without decay", dataclasses.replace(problem, a=np.full_like(problem.a, -np.inf))
    yield "the answer with beta = 0", dataclasses.replace(problem, b=np.full_like(problem.b, -np.inf))
