"""Every element in float64, each with a proved bound.

The derivation is docs/oracle-bounds-rotary.md, whose lemma numbers (R1, R2, ...) stand below.  Phases are reduced in
turns, exactly: a position times a frequency in float64 alone would err by position * 2^-53 radians.

Assumptions about numpy, tested: float64 cos and sin err by at most `TRIG_ULPS` ulp on [-3.2, 3.2]; cos(0) = 1 and
sin(0) = 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import flint
import numpy as np
from flint import arb

from verify.attention.oracle_float64 import TINY, UNIT
from verify.rotary import oracle_arb
from verify.rotary.problem import RotaryProblem, Rotated

if TYPE_CHECKING:
    from jaxtyping import Float64, Int

TRIG_ULPS = 2.0
TRIG_ERROR = 2.0 * TRIG_ULPS * UNIT * 1.001
# Lemma R2: relative error of the reduced phase, and what the last part of a frequency adds.
PHASE_RELATIVE = 2.6 * UNIT
PHASE_ABSOLUTE = 2.0**-90
# A frequency in turns is high + middle + low, multiples of 2^-32 and 2^-64 and the rest.
HIGH_BITS, MIDDLE_BITS = 32, 64
TWO_PI = 2.0 * math.pi
TOKENS_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Phases:
    """Cosine and sine with proved errors; exact at position 0.

    Attributes:
        cos: `[tokens, pairs]`.
        sin: `[tokens, pairs]`.
        cos_error: |cos - exact| <= cos_error.
        sin_error: |sin - exact| <= sin_error.
    """

    cos: Float64[np.ndarray, "tokens pairs"]
    sin: Float64[np.ndarray, "tokens pairs"]
    cos_error: Float64[np.ndarray, "tokens pairs"]
    sin_error: Float64[np.ndarray, "tokens pairs"]


@functools.lru_cache(maxsize=64)
def turns(base: float, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frequencies in turns per position, in three parts (lemma R1); computed once by ball arithmetic."""
    parts = []
    with flint.ctx.workprec(oracle_arb.PRECISION):
        for ball in oracle_arb.frequencies(base, width):
            turn = ball / (2 * arb.pi())
            high = _truncate(turn, HIGH_BITS)
            middle = _truncate(turn - arb(high), MIDDLE_BITS)
            parts.append((high, middle, float((turn - arb(high) - arb(middle)).mid())))
    columns = np.array(parts, dtype=np.float64).reshape(-1, 3).T.copy()
    columns.setflags(write=False)
    return columns[0], columns[1], columns[2]


def _truncate(ball: arb, bits: int) -> float:
    """A multiple of 2^-bits at most 2^-bits below the middle of a ball."""
    scaled = (ball.mid() * arb(2) ** bits).floor()  # below 2^32, so that float() is exact
    return math.ldexp(float(scaled.mid()), -bits)


def phases(base: float, width: int, positions: Int[np.ndarray, " tokens"]) -> Phases:
    """Cosine and sine of position * base**(-2 i / width) (lemmas R2 and R3)."""
    high, middle, low = turns(base, width)
    position = positions.astype(np.float64)[:, None]
    exact = position * high
    exact -= np.rint(exact)
    more = position * middle
    total = exact + more
    # Knuth's two-sum: total + rest is exact + more without error.
    part = total - exact
    rest = (exact - (total - part)) + (more - part)
    rest += position * low
    angle = total * TWO_PI + rest * TWO_PI
    doubt = PHASE_RELATIVE * np.abs(angle) + PHASE_ABSOLUTE * (position > 0.0)
    cos, sin = np.cos(angle), np.sin(angle)
    moved = (position > 0.0) * (1.0 + 8.0 * UNIT)
    return Phases(
        cos, sin, (doubt + TRIG_ERROR * np.abs(cos)) * moved, (doubt + TRIG_ERROR * np.abs(sin) + TINY) * moved
    )


def rotate(problem: RotaryProblem) -> Rotated:
    """Every element with a proved error, in blocks of tokens; a rotation by phase 0 is exact."""
    result = Rotated.start(problem, "float64")
    first, second = problem.lanes()
    with np.errstate(invalid="ignore", under="ignore"):
        for batch in range(problem.batch):
            positions = problem.position(batch)
            for start in range(0, problem.tokens, TOKENS_AT_ONCE):
                rows = slice(start, min(start + TOKENS_AT_ONCE, problem.tokens))
                table = phases(problem.base, problem.width, positions[rows])
                if problem.inverse:
                    table = dataclasses.replace(table, sin=-table.sin)
                moved = (positions[rows] > 0)[:, None]
                a = result.out[batch, :, rows, first].copy()
                b = result.out[batch, :, rows, second].copy()
                for lanes, one, two, sign in ((first, a, b, -1.0), (second, b, a, 1.0)):
                    out, error = _turn(table, one, two, sign, moved)
                    result.out[batch, :, rows, lanes] = out
                    result.error[batch, :, rows, lanes] = error
    return result.mark_undefined(problem)


def _turn(
    table: Phases, one: np.ndarray, two: np.ndarray, sign: float, moved: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One lane of every pair, one * cos + sign * two * sin (lemma R4)."""
    left, right = one * table.cos, two * table.sin
    error = np.abs(one) * table.cos_error + np.abs(two) * table.sin_error
    error += 2.0 * UNIT * (np.abs(left) + np.abs(right)) + TINY
    return left + sign * right, error * moved * (1.0 + 16.0 * UNIT)
