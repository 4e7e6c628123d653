"""The rotation as its definition reads, in mpmath; for tiny problems."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np

from verify.attention.oracle_mpmath import DPS, to_float64
from verify.rotary.problem import RotaryProblem, Rotated

Real = Any  # mpmath's numbers carry no types


def phase(problem: RotaryProblem, position: int, pair: int) -> Real:
    """position * base**(-2 pair / rotary_dim) in radians, at mpmath's present precision."""
    return position * mpmath.power(mpmath.mpf(problem.base), mpmath.mpf(-2 * pair) / problem.width)


def rotate(problem: RotaryProblem, *, dps: int = DPS) -> Rotated:
    """Every element, with `dps` decimal digits (lemma R5 of docs/oracle-bounds-rotary.md)."""
    result = Rotated.start(problem, "mpmath")
    first, second = (np.arange(problem.head_dim)[lanes] for lanes in problem.lanes())
    x = problem.numbers()
    with mpmath.workdps(dps):
        bits: Any = mpmath.mp.prec
        for batch, token, pair in np.ndindex(problem.batch, problem.tokens, problem.pairs):
            position = int(problem.position(batch)[token])
            angle = phase(problem, position, pair)
            cos, sin = mpmath.cos(angle), mpmath.sin(angle) * (-1 if problem.inverse else 1)
            doubt = position * 2.0 ** (12 - bits) * (1.0 + math.log(problem.base))
            for head in range(problem.x.shape[1]):
                at = (batch, head, token)
                a, b = float(x[(*at, first[pair])]), float(x[(*at, second[pair])])
                if not (math.isfinite(a) and math.isfinite(b)):
                    continue
                size = doubt * (abs(a) + abs(b))
                for lane, value in ((first[pair], a * cos - b * sin), (second[pair], b * cos + a * sin)):
                    result.out[(*at, lane)], result.error[(*at, lane)] = _number(value, size)
    return result.mark_undefined(problem)


def _number(x: Real, error: float) -> tuple[float, float]:
    if error == 0.0 and float(x) == x:
        return float(x), 0.0
    return to_float64(x, error)
