"""Whether the gradients' oracles can be trusted: a closed form, and agreement of three independent ways.

The interval tier differentiates forwards, one input number at a time, the others backwards: a mistake in the adjoint
shows between them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.cases import GdnCase
from verify.gdn.gradients import oracle_arb, oracle_float64, oracle_mpmath
from verify.gdn.gradients.problem import NAMES, GradientProblem
from verify.gdn.problem import DeltaRuleProblem, Sequences
from verify.gdn.reference import OracleUnsound

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.gdn.gradients.problem import GradientReference

    Oracle = Callable[[GradientProblem], GradientReference]

ACCURACY = 2.0**-36
"""An oracle has to be better than an FP32 result by far."""


def tiers() -> dict[str, Oracle]:
    """The oracles by name."""
    return {
        "float64": oracle_float64.gradients,
        "arb": oracle_arb.gradients,
        "mpmath": oracle_mpmath.gradients,
    }


def drawn(case: GdnCase) -> GradientProblem:
    """A case of the delta rule with random d_out and d_state."""
    rule = case.rule()
    rng = np.random.default_rng(case.seed + 1)
    d_state = rng.standard_normal((rule.sequences.count, *rule.state.shape[1:]))
    return GradientProblem(rule, rng.standard_normal(rule.v.shape).astype(np.float32), d_state.astype(np.float32))


def one_token() -> tuple[GradientProblem, dict[str, float]]:
    """d_k = d_v = 1, one token: everything in closed form."""
    q, k, v, beta, g, s, scale, by_out, by_state = 1.5, 0.75, -2.0, 0.5, -0.25, 3.0, 0.5, 1.25, -0.5

    def array(x: float, *shape: int) -> np.ndarray:
        return np.full(shape, x, np.float32)

    rule = DeltaRuleProblem(
        array(q, 1, 1, 1),
        array(k, 1, 1, 1),
        array(v, 1, 1, 1),
        array(beta, 1, 1),
        array(g, 1, 1),
        array(s, 1, 1, 1, 1),
        Sequences.single(1),
        scale=scale,
    )
    decayed = math.exp(g) * s
    missing = v - k * decayed
    after = decayed + k * beta * missing
    by_after = scale * q * by_out + by_state
    through = by_after * (1.0 - beta * k * k)
    answer = {
        "q": scale * after * by_out,
        "k": by_after * beta * (missing - k * decayed),
        "v": by_after * k * beta,
        "beta": by_after * k * missing,
        "g": through * decayed,
        "initial": through * math.exp(g),
    }
    return GradientProblem(rule, array(by_out, 1, 1, 1), array(by_state, 1, 1, 1, 1)), answer


def check_oracles(oracles: dict[str, Oracle] | None = None) -> None:
    """Check all tiers.

    Raises:
        OracleUnsound: one of them is wrong; the message names it and the derivative.
    """
    named = tiers() if oracles is None else oracles
    problem, answer = one_token()
    for name, oracle in named.items():
        found = oracle(problem)
        for what, due in answer.items():
            got = float(found.value[what].ravel()[0])
            error = abs(got - due)
            if not error <= float(found.error[what].ravel()[0]) + 2.0**-50 * (1.0 + abs(due)):
                message = f"{name}: the derivative by {what} of one token is {got!r}, not {due!r}"
                raise OracleUnsound(message)
    for case in (
        GdnCase("random", "1 to 2", "resets", seed=3, lengths=(2, 0, 3), heads=(1, 2, 2, 2)),
        GdnCase("near-duplicate", "up to 1", "mild", seed=5, lengths=(3,), heads=(1, 1, 3, 2), per_channel=True),
    ):
        _cross_check(drawn(case), named)


def _cross_check(problem: GradientProblem, oracles: dict[str, Oracle]) -> None:
    found = {name: oracle(problem) for name, oracle in oracles.items()}
    names = list(found)
    for first in names:
        for what in NAMES:
            value, error = found[first].value[what], found[first].error[what]
            if not (error <= ACCURACY * (1.0 + np.abs(value).max(initial=0.0))).all():
                message = f"{first}: its own bound of the derivative by {what} is {error.max():.3g}"
                raise OracleUnsound(message)
            for second in names:
                other = found[second]
                if not (np.abs(value - other.value[what]) <= error + other.error[what]).all():
                    message = f"{first} against {second}: derivatives by {what} differ"
                    raise OracleUnsound(message)
