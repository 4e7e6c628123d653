"""The rotation by ball arithmetic: intervals that certainly contain the exact result."""

from __future__ import annotations

import functools

import flint
import numpy as np
from flint import arb

from verify.attention.oracle_arb import to_float64
from verify.attention.reference import OracleUnsound
from verify.rotary.problem import RotaryProblem, Rotated

PRECISION = 192
"""Bits: 21 go to whole turns of positions up to 2**20, a few more to the power's own error."""

RELATIVE = 2.0**-80
"""Radii of cosine and sine that the oracle insists on."""


@functools.lru_cache(maxsize=64)
def frequencies(base: float, width: int, precision: int = PRECISION) -> tuple[arb, ...]:
    """base**(-2 i / width) for each pair i, in radians per position."""
    with flint.ctx.workprec(precision):
        logarithm = arb(base).log()
        return tuple((logarithm * -2 * i / width).exp() for i in range(width // 2))


def cos_sin(base: float, width: int, position: int, pair: int, precision: int = PRECISION) -> tuple[arb, arb]:
    """Cosine and sine of one phase.

    Raises:
        OracleUnsound: the precision does not give radii of RELATIVE.
    """
    with flint.ctx.workprec(precision):
        sin, cos = (frequencies(base, width, precision)[pair] * position).sin_cos()
        if max(sin.rad(), cos.rad()) > arb(RELATIVE):
            message = f"{precision} bits do not determine the phase at position {position}, pair {pair}, base {base}"
            raise OracleUnsound(message)
    return cos, sin


def rotate(problem: RotaryProblem, *, precision: int = PRECISION) -> Rotated:
    """Every element as a float64 number with a certified error; about 10 us for an element.

    Raises:
        OracleUnsound: the precision does not determine the phases.
    """
    result = Rotated.start(problem, "arb")
    first, second = (np.arange(problem.head_dim)[lanes] for lanes in problem.lanes())
    x = problem.numbers()
    finite = np.where(np.isfinite(x), x, 0.0)
    for batch, token, pair in np.ndindex(problem.batch, problem.tokens, problem.pairs):
        for head, (one, two) in enumerate(pair_balls(problem, finite, (batch, token, pair), precision=precision)):
            for lane, ball in ((first[pair], one), (second[pair], two)):
                result.out[batch, head, token, lane], result.error[batch, head, token, lane] = to_float64(ball)
    return result.mark_undefined(problem)


def pair_balls(
    problem: RotaryProblem, x: np.ndarray, at: tuple[int, int, int], *, precision: int = PRECISION
) -> list[tuple[arb, arb]]:
    """The rotated pair of each head, at (batch, token, pair) of the finite numbers `x`."""
    batch, token, pair = at
    first, second = (np.arange(problem.head_dim)[lanes][pair] for lanes in problem.lanes())
    position = int(problem.position(batch)[token])
    cos, sin = cos_sin(problem.base, problem.width, position, pair, precision)
    sin = -sin if problem.inverse else sin
    with flint.ctx.workprec(precision):
        pairs = [(arb(float(row[first])), arb(float(row[second]))) for row in x[batch, :, token]]
        return [(a * cos - b * sin, b * cos + a * sin) for a, b in pairs]
