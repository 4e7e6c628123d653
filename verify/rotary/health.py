"""Whether the rotary oracles can be trusted, asked before anything is judged by them.

Known answers come from a definition written here a second time, in the standard library's decimal arithmetic: the unit
complex number of one position by its Taylor series, raised to the position by repeated squaring (so without any
reduction of the phase), with its own pairing of lanes; and from the identity at position 0.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
from typing import TYPE_CHECKING

import numpy as np

from verify.attention import agreement
from verify.attention.problem import BF16
from verify.rotary import oracle_arb, oracle_float64, oracle_mpmath
from verify.rotary.problem import LARGEST_POSITION, RotaryProblem, Rotated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from verify.rotary.problem import Layout

    Oracle = Callable[[RotaryProblem], Rotated]

DIGITS = 60
# Relative to |first| + |second|; the float64 tier reaches 2e-15 at every position.
ACCURACY = 2.0**-46


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A problem with its answer."""

    name: str
    problem: RotaryProblem
    answer: Rotated


def tiers() -> dict[str, Oracle]:
    """The oracles by name."""
    return {"float64": oracle_float64.rotate, "arb": oracle_arb.rotate, "mpmath": oracle_mpmath.rotate}


def check_oracles() -> None:
    """Check every oracle against the known answers, and all of them against each other (a fraction of a second).

    Raises:
        OracleUnsound: one of them is wrong; the message names it, the case and the element.
    """
    for name, oracle in tiers().items():
        check_oracle(name, oracle)
    for known in known_answers():
        found = {f"{name} on {known.name}": oracle(known.problem) for name, oracle in tiers().items()}
        agreement.cross_check(found, _agree)


def check_oracle(name: str, oracle: Oracle) -> None:
    """Check one oracle against the known answers.

    Raises:
        OracleUnsound: it misses one of them, or its own bound is too large to judge anything.
    """
    for known in known_answers():
        found = oracle(known.problem)
        _agree(f"{name} on {known.name}", found, known.answer)
        defined = ~np.isnan(found.out)
        size = float(np.max(np.abs(found.out[defined]), initial=1.0))
        agreement.accurate(f"{name} on {known.name}", "out", found.error[defined], size, ACCURACY)


def _agree(what: str, found: Rotated, want: Rotated) -> None:
    agreement.agree(what, "out", found.out, want.out, found.error + want.error)


@functools.cache
def known_answers() -> tuple[Known, ...]:
    """Problems with answers that no oracle had a hand in."""
    return (*_by_decimal(), _identity(), _undefined())


def _by_decimal() -> Iterator[Known]:
    """Every layout and base, at positions where an unreduced or rounded phase shows; partly rotated heads; backward."""
    rng = np.random.default_rng(11)
    positions = np.array([[1, 257, 4095], [131071, 524287, LARGEST_POSITION]])
    table: tuple[tuple[float, Layout, int, bool], ...] = (
        (1e4, "half", 8, False),
        (1e4, "interleaved", 8, False),
        (1e5, "half", 6, False),
        (1e7, "interleaved", 6, True),
        (1e7, "half", 8, True),
    )
    for base, layout, width, inverse in table:
        x = rng.integers(-16, 17, (2, 2, 3, 8)) / 8
        problem = RotaryProblem(x.astype(BF16), positions, base, layout, width, inverse)
        name = f"base {base:g}, {layout}, {width} of 8 lanes{', inverse' if inverse else ''}"
        yield Known(name, problem, _rotate(problem))


def _identity() -> Known:
    """Position 0 leaves everything as it is, exactly."""
    x = np.arange(1, 9).reshape(1, 1, 1, 8).astype(np.float32)
    return Known(
        "position 0", RotaryProblem(x, np.array([0])), Rotated(x.astype(np.float64), np.zeros(x.shape), "known")
    )


def _undefined() -> Known:
    """A NaN spoils its pair and nothing else; a subnormal is zero."""
    x = np.array([[[[1.0, np.nan, 2.0, 3.0, 2.0**-130, 5.0]]]], dtype=np.float32)
    out = np.array([[[[1.0, np.nan, 2.0, np.nan, 0.0, 5.0]]]])
    error = np.where(np.isnan(out), np.inf, 0.0)
    problem = RotaryProblem(x, np.array([0]), rotary_dim=4)
    return Known("NaN in one pair", problem, Rotated(out, error, "known"))


def _rotate(problem: RotaryProblem) -> Rotated:
    x = problem.x.astype(np.float64)
    out = x.copy()
    width = problem.head_dim if problem.rotary_dim is None else problem.rotary_dim
    with decimal.localcontext(decimal.Context(prec=DIGITS)):
        for pair in range(width // 2):
            first, second = (pair, pair + width // 2) if problem.layout == "half" else (2 * pair, 2 * pair + 1)
            exponent = decimal.Decimal(-2 * pair) / width
            step = _unit((decimal.Decimal(problem.base).ln() * exponent).exp())
            for batch, head, token in np.ndindex(x.shape[:3]):
                cos, sin = _power(step, int(problem.positions[batch, token]))
                sin = -sin if problem.inverse else sin
                a, b = (decimal.Decimal(x[batch, head, token, lane]) for lane in (first, second))
                out[batch, head, token, first] = float(a * cos - b * sin)
                out[batch, head, token, second] = float(b * cos + a * sin)
    return Rotated(out, np.spacing(np.abs(out)), "known")


Complex = tuple[decimal.Decimal, decimal.Decimal]


def _unit(angle: decimal.Decimal) -> Complex:
    """Cosine and sine of an angle in [0, 1] by their Taylor series."""
    cos, sin, term, order = decimal.Decimal(0), decimal.Decimal(0), decimal.Decimal(1), 0
    while abs(term) > decimal.Decimal(10) ** (-DIGITS - 5):
        if order % 2 == 0:
            cos += term if order % 4 == 0 else -term
        else:
            sin += term if order % 4 == 1 else -term
        order += 1
        term = term * angle / order
    return cos, sin


def _power(number: Complex, exponent: int) -> Complex:
    """A complex power by repeated squaring."""
    result: Complex = (decimal.Decimal(1), decimal.Decimal(0))
    while exponent:
        if exponent % 2:
            result = _times(result, number)
        number = _times(number, number)
        exponent //= 2
    return result


def _times(a: Complex, b: Complex) -> Complex:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]
