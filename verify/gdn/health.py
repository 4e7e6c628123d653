"""Whether the oracles can be trusted, asked before anything is judged by them.

Known answers come from closed forms (`verify.gdn.open_cases`) and from the definition written a second time
(`verify.gdn.definition`), with its own layout of tokens, heads and slots.  Each tier has to give every known answer
within its own bound, the bound has to be small, and the tiers have to agree with each other within the sum of their
bounds.  The same for the inverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verify.gdn import inverse, oracle_arb, oracle_float64, oracle_mpmath
from verify.gdn.cases import GdnCase
from verify.gdn.definition import Known, by_decimal
from verify.gdn.open_cases import OPEN_CASES
from verify.gdn.reference import OracleUnsound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from verify.gdn.inverse import Inverse
    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference

    Oracle = Callable[[Problem], GdnReference]

ACCURACY = 2.0**-36
"""An oracle has to be better than an FP32 result by far; the float64 tier reaches about 1e-13 on the known cases."""
MOST_PRODUCTS = 3000
"""Tokens times state entries up to which the interval tier is asked."""


def tiers() -> dict[str, Oracle]:
    """The oracles by name."""
    return {
        "float64": oracle_float64.gdn,
        "float64 chunked": lambda problem: oracle_float64.gdn_chunked(problem, chunk=3),
        "arb": oracle_arb.gdn,
        "arb chunked": lambda problem: oracle_arb.gdn_chunked(problem, chunk=3),
        "mpmath": oracle_mpmath.gdn,
    }


def check_oracles() -> None:
    """Check every oracle against the known answers, all of them against each other, and the inverse (about a second).

    Raises:
        OracleUnsound: one of them is wrong; the message names it, the case and the element.
    """
    answers = list(known_answers())
    for name, oracle in tiers().items():
        check_oracle(name, oracle, answers)
    for known in answers:
        if known.answer.tier == "decimal":
            cross_check(known.problem, tiers())
    check_inverse({"exact": inverse.exact, "arb": inverse.balls, "float64": inverse.float64})


def check_oracle(name: str, oracle: Oracle, answers: Iterable[Known] | None = None) -> None:
    """Check one oracle against the known answers, or against some of them.

    Raises:
        OracleUnsound: it misses one of them, or its own bound is too large to judge anything.
    """
    for known in known_answers() if answers is None else answers:
        if name == "mpmath" and known.problem.tokens * known.problem.state[0].size > MOST_PRODUCTS:
            continue
        found = oracle(known.problem)
        _agree(f"{name} on {known.name}", found, known.answer)
        _accurate(f"{name} on {known.name}", found)


def cross_check(problem: Problem, oracles: Mapping[str, Oracle]) -> None:
    """Compare oracles on one problem, pair by pair.

    Raises:
        OracleUnsound: two of them differ by more than the sum of their bounds.
    """
    found = {name: oracle(problem) for name, oracle in oracles.items()}
    names = list(found)
    for position, first in enumerate(names):
        for second in names[position + 1 :]:
            _agree(f"{first} against {second}", found[first], found[second])


def _agree(what: str, found: GdnReference, other: GdnReference) -> None:
    for name in ("out", "state"):
        got, want = getattr(found, name), getattr(other, name)
        if got.shape != want.shape:
            message = f"{what}: {name} has shape {got.shape}, not {want.shape}"
            raise OracleUnsound(message)
        room = getattr(found, f"{name}_error") + getattr(other, f"{name}_error")
        with np.errstate(invalid="ignore"):
            same = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= room)
        if not same.all():
            index = tuple(int(i) for i in np.unravel_index(int(same.argmin()), same.shape))
            message = f"{what}: {name}{list(index)} is {got[index]!r}, not {want[index]!r} +- {room[index]!r}"
            raise OracleUnsound(message)


def _accurate(what: str, found: GdnReference) -> None:
    """Bounds far below what is judged, relative to the largest number."""
    for name in ("out", "state"):
        value, error = getattr(found, name), getattr(found, f"{name}_error")
        largest = np.max(np.abs(value[np.isfinite(value)]), initial=1.0)
        if not np.all(error <= ACCURACY * largest):
            message = f"{what}: its own bound of {name} is {error.max():.3g}, more than {ACCURACY * largest:.3g}"
            raise OracleUnsound(message)


def known_answers() -> Iterator[Known]:
    """Problems with answers that no oracle had a hand in."""
    for case in OPEN_CASES.values():
        if case.out is not None and case.tier == "cover":
            yield Known(case.name, case.build(), case.answer_of(case.build()))
    for name, problem in _drawn().items():
        yield Known(name, problem, by_decimal(problem))


def _drawn() -> dict[str, Problem]:
    """Small problems in which all sizes differ, heads are grouped and sequences packed."""
    heads = (2, 6, 3, 2)
    grouped = GdnCase("random", "1 to 2", "mild", seed=1, lengths=(2, 0, 3), heads=heads)
    channels = GdnCase(
        "near-duplicate", "up to 1", "huge", seed=2, lengths=(4, 1), heads=(1, 2, 3, 2), per_channel=True
    )
    fresh = GdnCase("norms-above-one", "2", "partly 0", seed=3, lengths=(3, 2), heads=(1, 1, 4, 2), initial=False)
    return {
        "grouped heads": grouped.rule(),
        "decay per channel": channels.rule(),
        "no initial state": fresh.rule(),
        "layer": grouped.layer(width=3, biased=True, negative=True),
        "layer with small inputs": fresh.layer(size=2.0**-10),
        "layer with large inputs, decay per channel": channels.layer(width=2, size=30.0),
    }


def check_inverse(oracles: Mapping[str, Callable[[np.ndarray], Inverse]]) -> None:
    """Closed form for equal keys, and agreement on random matrices.

    Raises:
        OracleUnsound: one of them is wrong.
    """
    n, beta = 64, 0.75
    i, j = np.indices((n, n))
    lower = np.where(i > j, beta, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        closed = np.where(i > j, -beta * (1.0 - beta) ** (i - j - 1.0), np.where(i == j, 1.0, 0.0))
    drawn = np.tril(np.random.default_rng(5).standard_normal((16, 16)), -1).astype(np.float32).astype(np.float64)
    found = {name: oracle(drawn) for name, oracle in oracles.items()}
    for name, oracle in oracles.items():
        equal = oracle(lower)
        if not (np.abs(equal.value - closed) <= equal.error + 2.0**-51 * np.abs(closed)).all():
            message = f"{name}: the inverse for equal keys is wrong"
            raise OracleUnsound(message)
        if not (equal.error <= ACCURACY).all():
            message = f"{name}: its own bound of the inverse for equal keys is {equal.error.max():.3g}"
            raise OracleUnsound(message)
        for other, second in found.items():
            first = found[name]
            if not (np.abs(first.value - second.value) <= first.error + second.error).all():
                message = f"{name} and {other} differ on the inverse of a random matrix"
                raise OracleUnsound(message)
